"""torchao's CPUOffloadOptimizer, which makes an optimizer of each parameter's copy on the host."""

import gc
import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mpkernels.optim.masters import needs_master
from mpkernels.optim.step_outcome import is_guarded


def refuse(optimizer: Any, params: Sequence[Tensor]) -> None:
    """Raise if torchao's CPUOffloadOptimizer is making this optimizer for one of its copies, and the optimizer would
    clip or skip: it would look at this grad alone, where it has to look at all."""
    offloading = getattr(sys.modules.get("torchao.optim.cpu_offload"), "CPUOffloadOptimizer", None)
    if offloading is None or len(params) != 1 or params[0].requires_grad or params[0].grad is None:
        return  # a copy is alone, has room for its grad, and needs none by autograd
    if is_guarded(optimizer, needs_master(params[0])) and any(
        host is params[0]
        for it in gc.get_objects()
        if issubclass(type(it), offloading)
        for host in getattr(it, "param_d2h_map", {}).values()
    ):
        raise ValueError(
            f"{type(optimizer).__name__}: max_norm and guard need the grads of all parameters, and torchao's "
            "CPUOffloadOptimizer makes an optimizer of each parameter; give it guard=False without max_norm, or use "
            "fully_shard (FSDP2) with a CPUOffloadPolicy in its place"
        )
