"""Compares the ops that update a loss scale and report an overflow."""

import torch

from mpkernels.bench.pairs import Pair
from mpkernels.bench.settings import Setting
from mpkernels.ops import grad_stats, overflow_, update_scale_


def compare_update_scale(setting: Setting) -> Pair:
    """Compare updates that leave the scale as it is: a growing scale would end in inf."""
    device, never = setting.place.device, 10**9
    scale, found_inf = torch.ones((), device=device), torch.zeros((), device=device)
    tracker, overflows = (torch.zeros(size, dtype=torch.int32, device=device) for size in ((), (2,)))

    def ours() -> None:
        update_scale_(scale, tracker, found_inf, 2.0, 0.5, never, overflows)

    def theirs() -> None:
        torch._amp_update_scale_(scale, tracker, found_inf, 2.0, 0.5, never)

    return Pair(lambda: ours, lambda: theirs, moved=36, clock="host")  # the flag is only read


def compare_overflow(setting: Setting, found: float) -> Pair:
    """Compare with one pass of grad_stats, because no op of torch's reports as much."""
    grads, device = setting.tensors(), setting.place.device
    report = torch.zeros(1 + len(grads), 6, dtype=torch.float64, device=device)
    found_inf = torch.full((), found, device=device)

    def ours() -> None:
        overflow_(grads, found_inf, None, False, report)

    def theirs() -> None:
        grad_stats(grads)

    moved = int(found) * sum(grad.nbytes for grad in grads)
    return Pair(lambda: ours, lambda: theirs, moved=moved, clock=setting.sizes.clock)
