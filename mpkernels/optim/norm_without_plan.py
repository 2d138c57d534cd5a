"""Computes the norm of grads on several devices, which no single plan covers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mpkernels._shared.parameters import by_device, real_values, sum_of
from mpkernels.ops.grads.grad_stats import grad_stats


def look(grads: Sequence[Tensor], shares: Sequence[float] | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return, on ``device``, the sum of the grads' squares, and whether one holds an inf or NaN."""
    sums = [torch.zeros((), dtype=torch.float64, device=device)]
    found = [torch.zeros((), dtype=torch.float32, device=device)]
    for total_sumsq, found_inf in stats_by_device(grads, shares):
        sums.append(total_sumsq)
        found.append(found_inf)
    return sum_of(sums), sum_of(found)


def stats_by_device(grads: Sequence[Tensor], shares: Sequence[float] | None) -> list[tuple[Tensor, Tensor]]:
    """Return, for each device and on it, the sum of its grads' squares, and whether one holds an inf or NaN.
    ``shares``: how much each grad's square counts; None where all count fully."""
    looked_at: list[tuple[Tensor, Tensor]] = []
    for there, places in by_device(grads, range(len(grads))).items():
        stats = grad_stats([real_values(numbers(grads[i])) for i in places])
        total_sumsq = stats.total_sumsq
        if shares is not None and set(shares) != {1.0}:
            shares_there = torch.tensor([shares[i] for i in places], dtype=torch.float64, device=there)
            total_sumsq = (stats.sumsq * shares_there).sum()
        looked_at.append((total_sumsq, stats.found_inf))
    return looked_at


def numbers(grad: Tensor) -> Tensor:
    """Return what a sparse grad adds up to, in fp32 if it has 16 bits: sums of fp16 may overflow."""
    if grad.layout != torch.sparse_coo:
        return grad
    return (grad.float() if grad.itemsize == 2 else grad).coalesce().values()
