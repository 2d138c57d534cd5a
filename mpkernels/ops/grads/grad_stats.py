"""grad_stats: what a training step must know of its grads before it uses them, in one pass that only reads."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mpkernels.ops import _checks
from mpkernels.ops._registry import define
from mpkernels.ops.grads.overflow import in_order_of_memory

PACK = 8  # consecutive elements, counted from the grad's first one
LEAST, MOST = 2.0**-100, 2.0**100  # a pack's sum in fp32 between these has lost nothing that counts


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
    """Add the squares of a pack, 8 consecutive elements, in fp32 and in pairs, and the packs' sums in fp64. So fp64,
    which some chips compute at a 64th of the speed, is needed once a pack. A pack whose sum lies outside of LEAST to
    MOST, or is inf or NaN, is added up again in fp64, where squares are exact and can't overflow; a pack of zeros
    adds 0. fp64 grads are added in fp64 throughout.

    A square and three additions give a pack a relative error of at most 4 * 2^-24. Kernels agree on each pack's bits.
    Each kernel adds packs in a fixed order of its own.
    """
    sumsq = torch.stack([_sums_of_packs(in_order_of_memory(grad)).sum() for grad in grads])
    nonfinite = torch.stack([grad.isfinite().logical_not().any() for grad in grads])
    return sumsq, nonfinite.float(), sumsq.sum(), nonfinite.any().float()


def _sums_of_packs(grad: Tensor) -> Tensor:
    wide = _in_pairs(grad.double())
    if grad.dtype == torch.float64:
        return wide
    narrow = _in_pairs(grad.float())
    return torch.where((narrow >= LEAST) & (narrow <= MOST), narrow.double(), wide)


def _in_pairs(grad: Tensor) -> Tensor:
    x = torch.nn.functional.pad(grad, (0, -grad.numel() % PACK)).view(-1, PACK).square()
    while x.shape[1] > 1:
        x = x[:, ::2] + x[:, 1::2]
    return x[:, 0]


def grad_stats(grads: Sequence[Tensor]) -> GradStats:
    """Return the sum of squares and non-finite flag of each grad and of all of them, in one pass that changes nothing.

    Neither an fp16 norm above 65504 nor an fp32 square above 3e38 is mistaken for an overflow, and no square is too
    small to count. Squares are added in fp32 by eights, and those sums in fp64, to a relative error of 4 * 2^-24 at
    most; fp64 grads are added in fp64. Results repeat to the last bit, whatever the number of threads. One launch for
    any number of tensors; nothing is copied to the host.

    Args:
        grads: at least one dense tensor, all on one device, in fp16, bf16, fp32 or fp64; empty ones are welcome.
    """
    return GradStats(*_grad_stats(grads))
