"""What the selector asks of those who know several ways to compute the same, and how near their results must be."""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Error(NamedTuple):
    """How far numbers are from what is exact, as a share of its norm."""

    share: float
    numbers: int


class Trial(Protocol):
    """A call like the one that is asked for, on data of its own."""

    dtype: torch.dtype  # that it computes in

    def run(self, name: str) -> Sequence[Tensor]:
        """Compute by a kernel, or by plain torch."""

    def errors(self, results: Sequence[Tensor]) -> list[Error]:
        """Return how far results are off, or parts of them that tell."""


def first_off(ours: Sequence[Error], torchs: Sequence[Error], dtype: torch.dtype) -> tuple[Error, Error] | None:
    """Return the first error of ours that exceeds the library's bound, and torch's beside it.

    The bound is torch's error, 2 % of it and a floor; and luck: n numbers may be nearer than torch mostly comes by
    a share of 1 / sqrt(n). Where torch's own error is not finite, as when something overflows, nothing can be told.
    """
    eps = torch.finfo(dtype).eps
    floor = eps / 8 if dtype.itemsize == 2 else 2 * eps
    luck = 2 * (eps + max((it.share for it in torchs if math.isfinite(it.share)), default=0.0))
    for our, of_torch in zip(ours, torchs, strict=True):
        bound = 1.02 * of_torch.share + floor + luck / math.sqrt(max(1, our.numbers))
        if not our.share <= bound and math.isfinite(of_torch.share):
            return our, of_torch
    return None
