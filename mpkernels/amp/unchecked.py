"""A scaler's step that leaves the check of the grads to the optimizer."""

from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from mpkernels.amp import handover, inf_check


def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> float | None:
    """Step with scaled grads, and keep what the optimizer finds out about them for the scaler's update."""
    scale, _ = scaler._check_scale_growth_tracker("step")
    peers, state = inf_check.given_peers(scaler, optimizer), scaler._per_optimizer_states[id(optimizer)]
    device = inf_check.device_of_verdict(optimizer, peers, scale.device)
    # The step writes the norm, and whether it was skipped.
    outcome = None if device is None else torch.zeros(2, dtype=torch.float32, device=device)
    handover.give(optimizer, scale, peers, outcome)
    result: float | None = optimizer.step(*args, **kwargs)
    handover.take_back(optimizer)
    state["found_inf_per_device"] = {} if outcome is None else {outcome.device: outcome[1]}
    state["stage"] = OptState.STEPPED
    return result
