"""The step of a single parameter in the backward, where AdamW releases grads."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from mpkernels.optim import group_options, verdicts
from mpkernels.optim.masters import needs_master
from mpkernels.optim.plan import Plan, Verdict
from mpkernels.optim.release import Release
from mpkernels.parameters import group_of, params_of
from mpkernels.parts import settled_grads


def steps_in_backward(optimizer: Any, scaler: torch.amp.GradScaler | None) -> list[tuple[Tensor, Release | None]]:
    """Return each parameter with the function that steps it alone; None where a step needs all grads first."""
    if optimizer.defaults.get("differentiable"):
        raise ValueError("AdamW: release_grads needs differentiable=False")
    params = params_of(optimizer)
    group_options.refuse_twice(params)
    is_guarded = verdicts.is_guarded(optimizer, any(map(needs_master, params)))
    waits = is_guarded or (scaler is not None and scaler.is_enabled())
    return [
        (param, None if waits else partial(_step_alone, optimizer, i, j))
        for i, group in enumerate(optimizer.param_groups)
        for j, param in enumerate(group["params"])
        if param.requires_grad
    ]


@torch.no_grad()
def _step_alone(optimizer: Any, group_number: int, place: int, param: Tensor) -> None:
    group, (grad,) = group_of(optimizer, param, group_number, place), settled_grads([param])
    if group is None or grad is None:
        return
    optimizer._compare_loaded()
    plan = Plan(optimizer._rule, [(group, param, optimizer._state_of(param, grad, group))], [0], is_for_once=True)
    plan.step([grad], Verdict())
    param.grad = None
