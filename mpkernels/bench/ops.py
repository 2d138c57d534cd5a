"""Single ops over lists of grads, beside the op of torch that does the same."""

import torch

from mpkernels.bench.pairs import Pair
from mpkernels.bench.settings import Setting
from mpkernels.ops import grad_stats, unscale_


def compare_unscale(setting: Setting) -> Pair:
    """Compare with the op that torch.amp.GradScaler calls."""
    grads, device = setting.tensors(), setting.place.device
    found_inf = torch.zeros(1, device=device)
    # 2 and back by 0.5, because torch has a short cut for 1.
    inv_scales = [torch.full((1,), value, device=device) for value in (2.0, 0.5)]

    def ours() -> None:
        for inv_scale in inv_scales:
            unscale_(grads, found_inf, inv_scale)

    def theirs() -> None:
        for inv_scale in inv_scales:
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)

    moved = 2 * sum(grad.nbytes for grad in grads)  # each element is read and written
    return Pair(lambda: ours, lambda: theirs, calls=2, moved=moved, clock=setting.sizes.clock)


def compare_grad_stats(setting: Setting) -> Pair:
    """Compare with the op that clip_grad_norm_ calls, which does less: no global norm, no check for inf."""
    grads = setting.tensors()

    def ours() -> None:
        grad_stats(grads)

    def theirs() -> None:
        torch._foreach_norm(grads)

    moved = sum(grad.nbytes for grad in grads)  # each element is read; a few bytes a tensor are written
    return Pair(lambda: ours, lambda: theirs, moved=moved, clock=setting.sizes.clock)
