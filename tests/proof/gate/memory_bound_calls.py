"""Calls of ops that are limited by memory, at 50 million elements, as a user makes them."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpkernels import ops
from mpkernels.ops import _registry
from mpkernels.optim import SGD, Adam, AdamW, Lion

BF16, FP32 = torch.bfloat16, torch.float32
ONE = [50_000_000]
MANY = 256 * [192 << 10]  # as much, near enough
MATRIX = [8192 * 6144]  # likewise
COLUMNS = 6144
SCALES = 2 * 4 / 256  # bytes of a state's scales, read and written


class Case(NamedTuple):
    bytes: float  # that an element costs, counted from the op's definition
    call: Callable[[list[int]], list[Tensor]]  # takes sizes; returns what it has changed and the reference can tell
    sizes: list[int]
    most_fp64: float = 0  # operations an element, of which a thread's own sum is made; the block's sum is bounded apart
    compilers: tuple[str, ...] = ("nvcc", "triton")

    @property
    def elements(self) -> int:
        return sum(self.sizes)


ORDINARY = 1 << 18  # elements that the counted block is among


def filled(*shape: int, dtype: torch.dtype) -> Tensor:
    """Its first numbers are ordinary ones. The rest is not even touched."""
    tensor = torch.empty(shape, dtype=dtype)
    first = tensor.view(-1)[:ORDINARY]
    first.copy_(_ordinary()[: len(first)])
    return tensor


@cache
def _ordinary() -> Tensor:
    return torch.randn(ORDINARY, generator=torch.Generator().manual_seed(0))


def step(sizes: list[int], kind: Callable[..., Any], dtype: torch.dtype, state_dtype: torch.dtype) -> list[Tensor]:
    params = [filled(size, dtype=dtype).requires_grad_() for size in sizes]
    for param in params:
        param.grad = filled(len(param), dtype=dtype)
    optimizer = kind(params, state_dtype=state_dtype, guard=False)
    optimizer.step()
    first = params[0]
    return [first.detach(), *(it for it in optimizer.state[first].values() if it.numel() == first.numel())]


def unscale(sizes: list[int], dtype: torch.dtype) -> list[Tensor]:
    grads = [filled(size, dtype=dtype) for size in sizes]
    ops.unscale_(grads, torch.zeros(()), torch.full((), 0.3))
    return grads[:1]


def stats(sizes: list[int], dtype: torch.dtype) -> list[Tensor]:
    """Sums, of which a block knows only its share."""
    ops.grad_stats([filled(size, dtype=dtype) for size in sizes])
    return []


def act(sizes: list[int], activation: str) -> list[Tensor]:
    """A layer so thin that its product is nothing beside the pass over the result. An approximation is not compared."""
    x, weight = filled(sizes[0] // COLUMNS, 1, dtype=BF16), filled(COLUMNS, 1, dtype=BF16)
    _registry._ops["linear_act"](x, weight, None, activation, True)
    return []


def act_backward(sizes: list[int], activation: str) -> list[Tensor]:
    dy, saved = (filled(sizes[0] // COLUMNS, COLUMNS, dtype=BF16) for _ in range(2))
    _registry._ops["linear_act_backward"](dy, dy[:, :1], None, saved, activation, FP32, FP32)
    return []


def steps(name: str, kind: Callable[..., Any], states: int) -> dict[str, Case]:
    """A rule's common calls. An element's weight and states are read and written, its grad is read."""

    def case(moved: float, dtype: torch.dtype, state_dtype: torch.dtype) -> Case:
        return Case(moved, partial(step, kind=kind, dtype=dtype, state_dtype=state_dtype), ONE)

    cases = {
        "fp32": case(12 + 8 * states, FP32, FP32),
        "bf16 split": case(10 + 8 * states, BF16, FP32),
        "bf16 split, 8-bit states": case(10 + (2 + SCALES) * states, BF16, torch.int8),
    }
    return {f"{name} {of_case}": it for of_case, it in cases.items() if states or "states" not in of_case}


ADAMW = partial(step, kind=AdamW)
CASES = {
    **steps("adamw_", AdamW, states=2),
    "adamw_ fp32 of 256": Case(28, partial(ADAMW, dtype=FP32, state_dtype=FP32), MANY),
    "adamw_ bf16 split, bf16 states": Case(18, partial(ADAMW, dtype=BF16, state_dtype=BF16), ONE),
    **steps("adam_", Adam, states=2),
    **steps("sgd_", SGD, states=0),
    **steps("sgd_ momentum", partial(SGD, momentum=0.9), states=1),
    **steps("lion_", Lion, states=1),
    # In fp64, for 8 elements: a conversion and a sum.
    "grad_stats fp32": Case(4, partial(stats, dtype=FP32), ONE, most_fp64=2 / 8),
    "grad_stats bf16": Case(2, partial(stats, dtype=BF16), ONE, most_fp64=2 / 8),
    "unscale_ fp32": Case(8, partial(unscale, dtype=FP32), ONE),
    "unscale_ bf16": Case(4, partial(unscale, dtype=BF16), ONE),
    "linear_act gelu": Case(4, partial(act, activation="gelu"), MATRIX, compilers=("nvcc",)),  # Triton's is a product
    "linear_act_backward gelu": Case(6, partial(act_backward, activation="gelu"), MATRIX),
    "linear_act_backward silu": Case(6, partial(act_backward, activation="silu"), MATRIX),
}
