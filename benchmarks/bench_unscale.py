"""unscale_ beside the op under torch.amp.GradScaler."""

import torch

from benchmarks.pairs import Pair
from mpkernels.ops import unscale_


def test_unscale(compare, grads, device):
    found_inf = torch.zeros(1, device=device)
    # Not 1, which torch takes a short cut for; and one undoes the other.
    inv_scales = [torch.full((1,), value, device=device) for value in (2.0, 0.5)]

    def ours():
        for inv_scale in inv_scales:
            unscale_(grads, found_inf, inv_scale)

    def theirs():
        for inv_scale in inv_scales:
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)

    # Every element is read and written.
    compare(Pair("unscale_", ours, theirs, calls=2, moved=2 * sum(grad.nbytes for grad in grads)))
