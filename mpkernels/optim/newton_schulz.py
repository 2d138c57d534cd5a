"""Newton-Schulz's iteration over a stack of matrices, as torch.optim.Muon computes it for one."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

# Elements of a stack that are iterated at once. The iteration holds up to four bf16 tensors of that size, so half a
# gigabyte, or of one matrix if that is larger.
_AT_ONCE = 2**26


def refuse_bad_numbers(groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise torch's errors for a group whose parameters are about to be stepped."""
    for group in groups:
        if group["ns_steps"] >= 100:
            raise ValueError("Number of steps must be less than 100 for computational efficiency")
        if len(group["ns_coefficients"]) != 3:
            raise ValueError("Coefficients must be a tuple of exactly 3 values")


def orthogonalize_(stack: Tensor, groups: list[Any]) -> None:
    """Replace each matrix by the nearest orthogonal one, nearly, with the numbers of the group that it belongs to."""
    numbers, first = [_numbers(group) for group in groups], 0
    at_once = max(1, _AT_ONCE // max(1, stack.shape[1] * stack.shape[2]))
    for i in range(1, len(groups) + 1):
        if i == len(groups) or i - first == at_once or numbers[i] != numbers[first]:
            _iterate_(stack if i - first == len(groups) else stack[first:i], *numbers[first])
            first = i


def _numbers(group: Mapping[str, Any]) -> tuple[tuple[float, ...], int, float]:
    return tuple(group["ns_coefficients"]), group["ns_steps"], group["eps"]


def _iterate_(matrices: Tensor, coefficients: tuple[float, ...], steps: int, eps: float) -> None:
    """A tall matrix is multiplied from the right, so that the Gram matrix is the smaller one."""
    if matrices.numel() == 0:
        return
    a, b, c = coefficients
    x = matrices.to(_dtype_for(matrices))
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp_(min=eps)
    is_tall = x.shape[1] > x.shape[2]
    for _ in range(steps):
        gram = torch.bmm(x.mT, x) if is_tall else torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, x, polynomial, beta=a) if is_tall else torch.baddbmm(x, polynomial, x, beta=a)
    matrices.copy_(x)


def _dtype_for(matrices: Tensor) -> torch.dtype:
    """Return torch's bf16; fp32 for small matrices on a CPU, where oneDNN takes longer to begin than to multiply."""
    is_small = matrices.numel() * min(matrices.shape[1:]) <= 2**20
    return torch.float32 if is_small and matrices.device.type == "cpu" else torch.bfloat16
