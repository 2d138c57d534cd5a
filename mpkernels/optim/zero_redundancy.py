"""Serves torch's ZeroRedundancyOptimizer, where each process steps some of the parameters, and has the grads of all."""

import sys
from functools import cache
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from mpkernels._shared.parameters import params_of
from mpkernels.distributed.processes import Processes
from mpkernels.optim.masters import needs_master
from mpkernels.optim.step_hooks import PassiveHook


def follow() -> None:
    """From now on, let each ZeroRedundancyOptimizer pass its process group to the optimizer of ours inside it, if
    that clips or guards."""
    if "torch.distributed.optim.zero_redundancy_optimizer" in sys.modules:  # else there is none yet
        _follow()


@cache
def _follow() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def give_group(optimizer: Any) -> None:
        inner: Any = getattr(optimizer, "optim", None)
        if isinstance(optimizer, ZeroRedundancyOptimizer) and getattr(inner, "_peers", optimizer) is None:
            params = params_of(optimizer)
            if inner.is_guarded(any(map(needs_master, params))):
                inner._peers = Processes(optimizer.process_group, device=params[0].device)

    register_optimizer_step_pre_hook(PassiveHook(give_group))
