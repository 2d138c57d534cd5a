"""grad_stats beside the op under torch.nn.utils.clip_grad_norm_, which does less: no global norm, no check for inf."""

import torch

from benchmarks.pairs import Pair
from mpkernels.ops import grad_stats


def test_grad_stats(compare, grads):
    def ours():
        grad_stats(grads)

    def theirs():
        torch._foreach_norm(grads)

    # Every element is read; what is written is a few bytes a tensor.
    compare(Pair("grad_stats", ours, theirs, calls=1, moved=sum(grad.nbytes for grad in grads)))
