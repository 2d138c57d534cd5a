"""grad_stats: what a training step must know of its grads before it uses them, in one pass that only reads."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mpkernels.ops import _checks
from mpkernels.ops._registry import define


class GradStats(NamedTuple):
    """All on the grads' device. ``total_sumsq.sqrt()`` is the global norm."""

    sumsq: Tensor  #: fp64, one for each tensor: the sum of squares
    nonfinite: Tensor  #: fp32, one for each tensor: 1 if it holds an inf or NaN, else 0
    total_sumsq: Tensor  #: fp64, 0-dim
    found_inf: Tensor  #: fp32, 0-dim: 1 if any tensor holds an inf or NaN, as torch's GradScaler has it


def _check(grads: Sequence[Tensor]) -> None:
    _checks.tensors("grad_stats", "grads", grads)
    if not grads:
        raise ValueError("grad_stats: grads must hold at least one tensor, got an empty list")


@define("grad_stats(Tensor[] grads) -> (Tensor, Tensor, Tensor, Tensor)", check=_check)
def _grad_stats(grads: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sumsq = torch.stack([grad.double().square().sum() for grad in grads])
    nonfinite = torch.stack([grad.isfinite().logical_not().any() for grad in grads])
    return sumsq, nonfinite.float(), sumsq.sum(), nonfinite.any().float()


def grad_stats(grads: Sequence[Tensor]) -> GradStats:
    """Return the sum of squares and non-finite flag of each grad and of all of them, in one pass that changes nothing.

    Sums are fp64, so neither an fp16 norm above 65504 nor an fp32 square above 3e38 is mistaken for an overflow.
    Results repeat to the last bit, whatever the number of threads. One launch for any number of tensors; nothing is
    copied to the host.

    Args:
        grads: at least one dense tensor, all on one device, in fp16, bf16, fp32 or fp64; empty ones are welcome.
    """
    return GradStats(*_grad_stats(grads))
