"""An optimizer's side of the contract with scalers, torch's and ours: who unscales the grads, who skips the step."""

import sys
from typing import Any

import torch
from torch import Tensor, distributed
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState

from mpkernels._shared.parameters import are_any_sharded, params_of, put_on, sum_of
from mpkernels.distributed.processes import is_torchs_sharded
from mpkernels.optim import common_verdict, step_hooks
from mpkernels.optim.step_outcome import Agreed, processes_of


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
        is_alone = not (distributed.is_available() and distributed.is_initialized())
        if torch.compiler.is_compiling() or (is_alone and not are_seen):
            return not are_seen
        asker = sys._getframe(1)
        scaler = asker.f_locals.get("self")
        optimizer._scaler = scaler if isinstance(scaler, GradScaler) else None
        if not are_seen or optimizer._scaler is None or asker.f_code.co_name != "step":
            return not are_seen
        return _can_step(optimizer, optimizer._scaler)


def _can_step(optimizer: Any, scaler: Any) -> bool:
    """Unscale the grads, unless the user has, and return whether those of all processes are finite. If they aren't,
    ``_own_step`` writes the outcome of a skipped step, because the scaler won't call ``step``. The host waits for the
    device."""
    params, state = params_of(optimizer), scaler._per_optimizer_states[id(optimizer)]
    _refuse_capture(optimizer, params)
    optimizer._step_outcome.find_parts(params, optimizer._peers)
    processes = processes_of(optimizer, params, scaler)
    step_unscales = state.setdefault("step_unscales", state["stage"] is OptState.READY)  # kept if step is tried again
    state["step_asks"], optimizer._step_outcome.agreed = processes is not None, None
    if state["stage"] is OptState.READY:
        try:
            _unscale(scaler, optimizer, state)
        except Exception:
            if processes is not None:
                processes.agree(params, None, None, has_failed=True)
            raise
    found_infs = list(state["found_inf_per_device"].values())
    optimizer.found_inf = sum_of(found_infs).clamp(max=1) if found_infs else 0.0
    try:
        if processes is not None:
            looks = step_unscales and getattr(scaler, "_leaves_check", False)
            found_inf = _found_by_all(optimizer, params, scaler._scale if step_unscales else None, looks)
            optimizer.found_inf, state["found_inf_per_device"] = found_inf, {found_inf.device: found_inf}
        if float(optimizer.found_inf) == 0:
            return True
        if state.get("skip_is_taken"):  # a subclass of the scaler has asked before its super().step does
            return False
        optimizer._own_step()
    finally:
        del optimizer.found_inf
    state["skip_is_taken"] = True
    step_hooks.tell_of_skip(optimizer)
    return False


def _refuse_capture(optimizer: Any, params: list[Tensor]) -> None:
    if any(it.is_cuda for it in params) and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{type(optimizer).__name__}: a step with hooks or of a subclass can't be captured in a CUDA graph under a "
            "scaler, because the host must know whether to skip them; remove them, and clip by max_norm"
        )


@torch.no_grad()
def _found_by_all(optimizer: Any, params: list[Tensor], scale: Tensor | None, looks: bool) -> Tensor:
    """Agree with the other processes now, not in the step; those without hooks agree in the step, as often. ``scale``
    is the loss scale that grads still contain when their norm is exchanged; ``looks`` says whether a norm is exchanged
    without max_norm, too."""
    scaler, device = optimizer._scaler, params[0].device if params else torch.device("cpu")
    if looks:
        optimizer.outcome = torch.empty(2, dtype=torch.float32, device=device)
    try:
        here, processes = optimizer._look(params, are_any_sharded(params))[2:]
    finally:
        if looks:
            del optimizer.outcome
    unit = torch.ones((), dtype=torch.float64) if scale is None else put_on(device, scale).double().square()
    as_scaled = here if here.total_sumsq is None else here._replace(total_sumsq=here.total_sumsq * unit)
    has_norm = optimizer.max_norm is not None or optimizer.guard is True
    may_change = has_norm and step_hooks.may_change_grads(optimizer)
    found_inf, sumsq_of_all, changing = common_verdict.ask_all(optimizer, params, as_scaled, processes, may_change)
    optimizer._scaler = scaler
    optimizer._step_outcome.agreed = Agreed(
        found_inf,
        here.total_sumsq,
        None if sumsq_of_all is None else sumsq_of_all / unit,
        may_change and changing.item() == processes.size(),
    )
    return found_inf


def _unscale(scaler: Any, optimizer: Any, state: dict[str, Any]) -> None:
    if type(scaler).unscale_ is not GradScaler.unscale_ and not is_torchs_sharded(scaler):
        scaler.unscale_(optimizer)
        return
    # torch's unscale_ would refuse fp16 grads, although this optimizer takes them, and would ask the other processes.
    inv_scale = scaler._scale.double().reciprocal().float()
    found_inf = torch.zeros((), dtype=torch.float32, device=inv_scale.device)
    state["found_inf_per_device"] = scaler._unscale_grads_(optimizer, inv_scale, found_inf, True)
    state["stage"] = OptState.UNSCALED
