"""Single ops over lists of grads, beside the op of torch that does the same."""

import torch

from mpkernels.bench.pairs import Pair
from mpkernels.bench.settings import Setting
from mpkernels.ops import grad_stats, overflow_, unscale_, update_scale_


def compare_unscale(setting: Setting) -> Pair:
    """Beside the op under torch.amp.GradScaler."""
    grads, device = setting.tensors(), setting.place.device
    found_inf = torch.zeros(1, device=device)
    # Not 1, which torch takes a short cut for; and one undoes the other.
    inv_scales = [torch.full((1,), value, device=device) for value in (2.0, 0.5)]

    def ours() -> None:
        for inv_scale in inv_scales:
            unscale_(grads, found_inf, inv_scale)

    def theirs() -> None:
        for inv_scale in inv_scales:
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)

    # Every element is read and written.
    moved = 2 * sum(grad.nbytes for grad in grads)
    return Pair(lambda: ours, lambda: theirs, calls=2, moved=moved, clock=setting.case.clock)


def compare_grad_stats(setting: Setting) -> Pair:
    """Beside the op under torch.nn.utils.clip_grad_norm_, which does less: no global norm, no check for inf."""
    grads = setting.tensors()

    def ours() -> None:
        grad_stats(grads)

    def theirs() -> None:
        torch._foreach_norm(grads)

    # Every element is read; what is written is a few bytes a tensor.
    moved = sum(grad.nbytes for grad in grads)
    return Pair(lambda: ours, lambda: theirs, moved=moved, clock=setting.case.clock)


def compare_update_scale(setting: Setting) -> Pair:
    """Where the scale stays as it is: one that grows would end in inf."""
    device, never = setting.place.device, 10**9
    scale, found_inf = torch.ones((), device=device), torch.zeros((), device=device)
    tracker, overflows = (torch.zeros(size, dtype=torch.int32, device=device) for size in ((), (2,)))

    def ours() -> None:
        update_scale_(scale, tracker, found_inf, 2.0, 0.5, never, overflows)

    def theirs() -> None:
        torch._amp_update_scale_(scale, tracker, found_inf, 2.0, 0.5, never)

    return Pair(lambda: ours, lambda: theirs, moved=36, clock="host")  # all but the flag are read and written


def compare_overflow(setting: Setting, found: float) -> Pair:
    """Beside one pass of grad_stats, as a measure: nothing of torch's tells as much."""
    grads, device = setting.tensors(), setting.place.device
    report = torch.zeros(1 + len(grads), 6, dtype=torch.float64, device=device)
    found_inf = torch.full((), found, device=device)

    def ours() -> None:
        overflow_(grads, found_inf, None, False, report)

    def theirs() -> None:
        grad_stats(grads)

    moved = int(found) * sum(grad.nbytes for grad in grads)
    return Pair(lambda: ours, lambda: theirs, moved=moved, clock=setting.case.clock)
