"""torch's scalers as they are: they read an attribute of an optimizer to know whether it unscales and skips by itself,
they hand over by attributes, and they know nothing of other processes."""

import sys
from typing import Any

import torch
from torch import Tensor, distributed
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from mpkernels.distributed.processes import Processes, are_several
from mpkernels.optim import step_hooks
from mpkernels.optim.under_scaler import Handed


class TakesScale:
    """An optimizer's ``_step_supports_amp_scaling``: whether its step unscales the grads and skips by itself.

    The step doesn't where hooks or a subclass's step would see scaled grads. A scaler's ``step`` reads this attribute
    before it calls the optimizer, and nothing else tells the optimizer of the scaler. So that is the time to unscale
    such grads, and to look at them in all processes, which torch's scaler doesn't do.

    The optimizer remembers the scaler: torch updates its scale by this process's found_inf alone, which the step of
    several processes has to correct.
    """

    def __get__(self, optimizer: Any, kind: type | None = None) -> bool:
        if optimizer is None:
            return True
        are_seen = step_hooks.see_grads(optimizer)
        if not are_seen:
            optimizer._agreement.early = None  # of a step that a hook broke off, before all hooks were removed
        is_alone = not (distributed.is_available() and distributed.is_initialized())
        if torch.compiler.is_compiling() or (is_alone and not are_seen):
            return not are_seen
        asker = sys._getframe(1)
        scaler = asker.f_locals.get("self")
        optimizer._scaler = scaler if isinstance(scaler, GradScaler) else None
        if not are_seen or optimizer._scaler is None or asker.f_code.co_name != "step":
            return not are_seen
        return bool(optimizer.settle_before_hooks(optimizer._scaler))


def handed_over(optimizer: Optimizer, scaler: Any) -> Handed:
    """Return what a scaler of torch's has set on the optimizer. ``scaler``: the one that last asked, if any has."""
    found_inf = getattr(optimizer, "found_inf", None)
    scaler = None if found_inf is None else scaler
    peers = None if scaler is None else processes_of(scaler)
    return Handed(getattr(optimizer, "grad_scale", None), found_inf, peers, scaler=scaler)


def processes_of(scaler: Any) -> Processes | None:
    """Return the processes of the scaler that an optimizer steps under. With torch's ShardedGradScaler they only share
    found_inf, because their grads may be DDP's."""
    given: Processes | None = getattr(scaler, "_peers", None)
    if given is not None or not (are_several() and _is_sharded(scaler)):
        return given
    return Processes(scaler.process_group or distributed.group.WORLD, holds_parts=False)


def _is_sharded(scaler: Any) -> bool:
    loaded = sys.modules.get("torch.distributed.fsdp.sharded_grad_scaler")  # else there can be none
    return loaded is not None and isinstance(scaler, loaded.ShardedGradScaler)


def unscale(scaler: Any, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Unscale the optimizer's grads as the scaler does before a step. ``state``: what it notes on the optimizer."""
    if type(scaler).unscale_ is not GradScaler.unscale_ and not _is_sharded(scaler):
        scaler.unscale_(optimizer)
        return
    # torch's unscale_ would refuse fp16 grads, although this optimizer takes them, and would ask the other processes.
    inv_scale = scaler._scale.double().reciprocal().float()
    found_inf = torch.zeros((), dtype=torch.float32, device=inv_scale.device)
    state["found_inf_per_device"] = scaler._unscale_grads_(optimizer, inv_scale, found_inf, True)
    state["stage"] = OptState.UNSCALED


def hand_back(scaler: Any, optimizer: Optimizer, found_inf: Tensor) -> None:
    """Give found_inf to the scaler that the optimizer steps under, for the scaler's update."""
    scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {found_inf.device: found_inf}


def is_a_wrapper(optimizer: Optimizer, attributes: dict[str, Any]) -> bool:
    """Return whether this optimizer forwards reads of attributes to an inner one, but not writes: the inner optimizer
    would never see what a scaler sets. ``attributes`` are those of this optimizer alone."""
    flag, kind = "_step_supports_amp_scaling", type(optimizer)
    has_flag = hasattr(kind, flag) or flag in attributes
    return not has_flag and getattr(optimizer, flag, False) and kind.__setattr__ is object.__setattr__
