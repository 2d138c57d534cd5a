"""overflow_: writes a report on the grads of a skipped step, on the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mpkernels._shared.parameters import order_of_memory
from mpkernels.ops import _checks
from mpkernels.ops._registry import define

FIELDS = ("size", "infs", "nans", "first", "largest", "zeros")  # of each line of a report


def check_report(op: str, report: Tensor, grads: int, device: torch.device) -> None:
    _checks.contiguous(op, "report", report, torch.float64, (1 + grads, len(FIELDS)), device)


def _check(grads: Sequence[Tensor], found_inf: Tensor, scale: Tensor | None, unscaled: bool, report: Tensor) -> None:
    _checks.scalar("overflow_", "found_inf", found_inf)
    if scale is not None:
        _checks.scalar("overflow_", "scale", scale, like=found_inf)
    _checks.tensors("overflow_", "grads", grads, device=found_inf.device)
    check_report("overflow_", report, len(grads), found_inf.device)


@define(
    "overflow_(Tensor[] grads, Tensor found_inf, Tensor? scale, bool unscaled, Tensor(a!) report) -> ()", check=_check
)
def _overflow(grads: Sequence[Tensor], found_inf: Tensor, scale: Tensor | None, unscaled: bool, report: Tensor) -> None:
    if grads:
        report.copy_(torch.where(found_inf.reshape(()) != 0, lines(grads, grads, scale, unscaled), report))


def lines(grads: Sequence[Tensor], order: Sequence[Tensor], scale: Tensor | None, unscaled: bool) -> Tensor:
    """Return the report about ``grads``, each read in the memory order of its tensor in ``order``."""
    zero = grads[0].new_zeros((), dtype=torch.float64)
    divisor = zero if scale is None else scale.reshape(()).double()
    grad_lines = [_line(in_order_of_memory(*pair).double(), zero) for pair in zip(grads, order, strict=True)]
    heading = [zero + 1, divisor, zero + 1 if scale is None or unscaled else divisor, zero, zero, zero]
    return torch.stack([torch.stack(line) for line in (heading, *grad_lines)])


def _line(x: Tensor, zero: Tensor) -> list[Tensor]:
    nothing = zero + torch.inf
    if x.numel() == 0:
        return [zero, zero, zero, nothing, zero, zero]
    bad = x.isfinite().logical_not()
    first = torch.where(bad.any(), bad.to(torch.uint8).argmax(), nothing)
    largest = torch.where(bad, 0, x.abs()).amax()
    return [
        zero + x.numel(),
        x.isinf().double().sum(),
        x.isnan().double().sum(),
        first,
        largest,
        (x == 0).double().sum(),
    ]


def in_order_of_memory(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return the elements in the order in which ``like``, or else the tensor itself, fills its memory; in the order of
    indices if there are gaps."""
    like = tensor if like is None else like
    dims = order_of_memory(like)
    return (tensor.permute(dims) if like.permute(dims).is_contiguous() else tensor).reshape(-1)


def overflow_(grads: Sequence[Tensor], found_inf: Tensor, scale: Tensor | None, unscaled: bool, report: Tensor) -> None:
    """Fill ``report`` if ``found_inf`` is not 0. Otherwise read no grad and write nothing.

    One launch for any number of tensors; nothing is copied to the host. All kernels give the same bits.

    Args:
        grads: dense tensors on the device of found_inf, in fp16, bf16, fp32 or fp64; empty ones are welcome.
        found_inf: one fp32.
        scale: one fp32, the loss scale of the step, if there is one.
        unscaled: whether the grads have been divided by the scale already.
        report: fp64, contiguous, of shape (1 + len(grads), 6). The first row is a heading: 1; the scale, or 0; the
            factor that the grads still contain; three zeros. Then comes one row for each grad: the number of elements;
            the number of infs; the number of NaNs; the index of the first inf or NaN in memory order, or inf if there
            is none; the largest finite magnitude; the number of zeros. A grad with gaps or overlaps in memory is read
            in the order of its indices instead.
    """
    _overflow(grads, found_inf, scale, unscaled, report)
