"""Refuses torchao's CPUOffloadOptimizer, which makes an optimizer of each parameter's copy on the host, where it can't
work."""

import gc
import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mpkernels.optim.masters import needs_master

_INSTEAD = "fully_shard (FSDP2) with a CPUOffloadPolicy in its place"


def refuse(optimizer: Any, params: Sequence[Tensor]) -> None:
    """Raise if torchao's CPUOffloadOptimizer is making this optimizer for one of its copies, and the optimizer would
    clip or skip: it would look at this grad alone, where it has to look at all."""
    offloading = _offloading()
    if offloading is None or len(params) != 1 or params[0].requires_grad or params[0].grad is None:
        return  # a copy is alone, has room for its grad, and needs none by autograd
    if optimizer.is_guarded(needs_master(params[0])) and any(
        host is params[0]
        for it in gc.get_objects()
        if issubclass(type(it), offloading)
        for host in getattr(it, "param_d2h_map", {}).values()
    ):
        raise ValueError(
            f"{type(optimizer).__name__}: max_norm and guard need the grads of all parameters, and torchao's "
            "CPUOffloadOptimizer makes an optimizer of each parameter; give it guard=False without max_norm, or use "
            f"{_INSTEAD}"
        )


def refuse_scaler(optimizer: Any) -> None:
    """Raise if the optimizer is torchao's: its backward hooks start copies to the host, its step alone waits for
    them."""
    offloading = _offloading()
    if offloading is not None and isinstance(optimizer, offloading):
        raise TypeError(
            "GradScaler: optimizer must not be torchao's CPUOffloadOptimizer, whose grads may still be on their way to "
            f"the host; train in bf16 without a scaler, or use {_INSTEAD}"
        )


def _offloading() -> Any:
    return getattr(sys.modules.get("torchao.optim.cpu_offload"), "CPUOffloadOptimizer", None)  # else there is none
