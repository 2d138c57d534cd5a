"""GradScaler's step of an optimizer that checks its grads itself. They exchange data as attributes of the optimizer."""

from functools import partial
from typing import Any

from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from mpkernels._shared.parameters import are_any_sharded, params_of
from mpkernels.amp.inf_check import given_peers
from mpkernels.amp.retries import Attempt
from mpkernels.distributed import fsdp1
from mpkernels.optim.offload import have_left

NAMES = ("grad_scale", "found_inf", "outcome", "peers")


def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> float | None:
    """Step with scaled grads. The optimizer unscales them, looks for inf and NaN in all processes, and writes its
    verdict where the scaler's update reads it. A step that has failed after its op is not taken again."""
    scale, _ = scaler._check_scale_growth_tracker("step")
    peers, state, result = given_peers(scaler, optimizer), scaler._per_optimizer_states[id(optimizer)], None
    attempt: Attempt | None = state.get("attempt")
    if attempt is None or not attempt.was_done():
        params = params_of(optimizer)
        device = next((param.grad.device for param in params if param.grad is not None), None)
        if device is None and (
            peers is not None or are_any_sharded(params) or fsdp1.has_parts(params) or have_left(optimizer)
        ):
            device = scale.device  # other processes may have grads, or grads wait on the host
        attempt = state["attempt"] = None if device is None else Attempt(partial(params_of, optimizer), device)
        vars(optimizer).pop("found_inf", None)  # torch's scaler may have left one there
        if peers is not None:
            optimizer.peers = peers
        preset = getattr(optimizer, "grad_scale", None)
        optimizer.grad_scale = scale if preset is None else scale * preset
        # The optimizer writes to this tensor, because attributes that compiled code sets are lost outside of that code.
        optimizer.outcome = None if attempt is None else attempt.outcome
        try:
            result = optimizer.step(*args, **kwargs)
        except BaseException:
            if attempt is not None:
                attempt.note_failure()
            raise
    take_back(vars(optimizer))
    state["found_inf_per_device"] = {} if attempt is None else {attempt.found_inf.device: attempt.found_inf}
    state["stage"] = OptState.STEPPED
    return result


def take_back(attributes: dict[str, Any]) -> None:
    """Remove what a scaler has set on an optimizer with these attributes."""
    for name in NAMES:
        attributes.pop(name, None)


def is_a_wrapper(optimizer: Optimizer, attributes: dict[str, Any]) -> bool:
    """Return whether this optimizer forwards reads of attributes to an inner one, but not writes: the inner optimizer
    would never see what a scaler sets. ``attributes`` are those of this optimizer alone."""
    flag, kind = "_step_supports_amp_scaling", type(optimizer)
    has_flag = hasattr(kind, flag) or flag in attributes
    return not has_flag and getattr(optimizer, flag, False) and kind.__setattr__ is object.__setattr__
