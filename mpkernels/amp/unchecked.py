"""A scaler's step that leaves the check of the grads to the optimizer."""

from functools import partial
from typing import Any

from torch.amp.grad_scaler import OptState

from mpkernels._shared.parameters import params_of
from mpkernels.amp import handover, inf_check
from mpkernels.amp.attempts import Attempt


def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> float | None:
    """Step with scaled grads, and keep what the optimizer finds out about them for the scaler's update. A step
    that has failed after its op is not taken again."""
    scale, _ = scaler._check_scale_growth_tracker("step")
    peers, state, result = inf_check.given_peers(scaler, optimizer), scaler._per_optimizer_states[id(optimizer)], None
    attempt: Attempt | None = state.get("attempt")
    if attempt is None or not attempt.was_done():
        device = inf_check.device_of_verdict(optimizer, peers, scale.device)
        attempt = state["attempt"] = None if device is None else Attempt(partial(params_of, optimizer), device)
        handover.give(optimizer, scale, peers, None if attempt is None else attempt.outcome)
        try:
            result = optimizer.step(*args, **kwargs)
        except BaseException:
            if attempt is not None:
                attempt.note_failure()
            raise
    handover.take_back(optimizer)
    state["found_inf_per_device"] = {} if attempt is None else {attempt.found_inf.device: attempt.found_inf}
    state["stage"] = OptState.STEPPED
    return result
