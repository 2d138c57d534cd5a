"""GradScaler's step of an optimizer of ours, which it calls by name. torch's scalers hand over by attributes instead
(optim/torch_scalers.py). Somebody has to unscale the grads, look at them, ask the other processes, and skip:

* Usually the optimizer's step does all of that.
* If step hooks, or a subclass's step, see the grads, ``settle_before_hooks`` does it, in place. The step looks and asks
  again where all processes have hooks that may change grads.
* If the user has called ``unscale_``, that has done it. With ``max_norm`` or ``guard=True`` the step looks and asks
  again; it skips.
* If a subclass of GradScaler replaces the check, the scaler looks before the step, which does all of that.
"""

from functools import partial
from typing import Any

from torch.amp.grad_scaler import OptState

from mpkernels._shared.parameters import are_any_sharded, params_of, sum_of
from mpkernels.amp.inf_check import given_peers
from mpkernels.amp.retries import Attempt
from mpkernels.distributed import fsdp1
from mpkernels.optim import step_hooks
from mpkernels.optim.offload import has_grads_on_host
from mpkernels.optim.skipping_optimizer import SkippingOptimizer
from mpkernels.optim.under_scaler import Handed, Notes


def step_by_name(scaler: Any, optimizer: SkippingOptimizer, leaves_check: bool, args: Any, kwargs: Any) -> Any:
    """Step with grads that may still be scaled. The optimizer unscales them, looks for inf and NaN in all processes,
    and writes its verdict where the scaler's update reads it. A step that has failed after its op is not taken again
    (``Attempt``). leaves_check: whether the scaler leaves the look at scaled grads to the step."""
    state = scaler._per_optimizer_states[id(optimizer)]
    are_seen = step_hooks.see_grads(optimizer)
    if are_seen or not leaves_check or state["stage"] is not OptState.READY:
        result = None
        if not are_seen or optimizer.settle_before_hooks(scaler):
            result = _step_looked_at(scaler, optimizer, state, args, kwargs)
        state["stage"] = OptState.STEPPED
        return result
    scale, _ = scaler._check_scale_growth_tracker("step")
    has_peers = scaler._peers is not None or optimizer._peers is not None
    peers, notes, result = given_peers(scaler, optimizer) if has_peers else None, Notes.among(state), None
    attempt: Attempt | None = notes.attempt
    if attempt is None or not attempt.was_done():
        params = params_of(optimizer)
        device = next((param.grad.device for param in params if param.grad is not None), None)
        if device is None and (
            peers is not None or are_any_sharded(params) or fsdp1.has_parts(params) or has_grads_on_host(optimizer)
        ):
            device = scale.device  # other processes may have grads, or grads wait on the host
        attempt = notes.attempt = None if device is None else Attempt(partial(params_of, optimizer), device)
        preset = getattr(optimizer, "grad_scale", None)
        outcome = None if attempt is None else attempt.outcome
        handed = Handed(scale if preset is None else scale * preset, None, peers, outcome)
        try:
            result = optimizer.step_scaled(handed, *args, **kwargs)
        except BaseException:
            if attempt is not None:
                attempt.note_failure()
            raise
    state["found_inf_per_device"] = {} if attempt is None else {attempt.found_inf.device: attempt.found_inf}
    state["stage"] = OptState.STEPPED
    return result


def _step_looked_at(scaler: Any, optimizer: SkippingOptimizer, state: dict[str, Any], args: Any, kwargs: Any) -> Any:
    """Step with grads that have been looked at. The optimizer hands back what all processes have found."""
    scale = getattr(optimizer, "grad_scale", None)  # of the user's, as torch takes it
    if state["stage"] is OptState.READY:
        scaler._check_inf_per_device(optimizer)
        scale = scaler._scale if scale is None else scaler._scale * scale
    found_infs = list(state["found_inf_per_device"].values())
    found_inf = sum_of(found_infs) if found_infs else 0.0
    return optimizer.step_scaled(
        Handed(scale, found_inf, given_peers(scaler, optimizer), scaler=scaler), *args, **kwargs
    )
