"""The state of one parameter: made when its first grad comes, or converted from a checkpoint."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mpkernels.distributed.parts import part_for, part_of, placed_as
from mpkernels.ops.step import int8
from mpkernels.optim import masters
from mpkernels.optim.optimizer_rule import OptimizerRule

_ELSEWHERE = {"master_param": "master"}  # TransformerEngine's key -> ours

State = dict[str, Tensor]


def create(rule: OptimizerRule, param: Tensor, group: Mapping[str, Any]) -> State:
    """Return a state before the first step. The master is the parameter as it is, exactly."""
    state = placed(rule, param, _without_master(rule, part_of(param), group["state_dtype"], rule.keys(group)))
    masters.give(state, param, group["master"])
    return state


def for_step(rule: OptimizerRule, name: str, param: Tensor, state: State, group: Mapping[str, Any]) -> State:
    """Return a parameter's state as the next step takes it: a new one where there is none, and one that follows the
    group's options and the parameter's dtype, which may have changed."""
    if not state:
        return create(rule, param, group)
    if "step" not in state and any(key in state for key in rule.ops.rule.states):  # a loader has put them in place
        steps = _steps_so_far(rule, name, state, group)
        state = state | {"step": torch.full((), steps, dtype=torch.float32, device=param.device)}
    masters.drop_unfit(state, param)
    if missing := [key for key in rule.keys(group) if key not in state]:  # the group's option was set later
        zeros = placed(rule, param, _without_master(rule, part_of(param), torch.float32, missing))
        state = zeros | decoded(rule, param, state)
    if _is_kept_otherwise(rule, param, state, group["state_dtype"]):
        state = adopt(rule, name, param, state, group, group["state_dtype"])
    masters.give(state, param, group["master"])
    if "step" in state:
        state["step"] = state["step"].to(torch.float32)  # a user may have set another dtype
    return state


def placed(rule: OptimizerRule, param: Tensor, state: State) -> State:
    """Return a part's state as its parameter's: what has the parameter's shape is placed as the parameter is."""
    shaped = *rule.ops.rule.states, *masters.KEYS.values()
    return {key: placed_as(param, value) if key in shaped else value for key, value in state.items()}


def _without_master(rule: OptimizerRule, param: Tensor, state_dtype: torch.dtype, keys: Sequence[str]) -> State:
    state = {"step": torch.zeros((), dtype=torch.float32, device=param.device)} if keys else {}
    dtype = _dtype_kept(param, state_dtype)
    for key in keys:
        state[key] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
    if dtype == torch.int8 and keys:
        for key in keys:
            state[key].fill_(-128 if rule.is_squared(key) else 0)  # the codes of 0
        blocks = len(keys) * -(-param.numel() // int8.QUANTIZED)
        state["scales"] = torch.zeros(blocks, dtype=torch.float32, device=param.device)
    return state


def _dtype_kept(param: Tensor, state_dtype: torch.dtype) -> torch.dtype:
    return param.dtype if param.dtype == torch.float64 or param.is_complex() else state_dtype


def _is_kept_otherwise(rule: OptimizerRule, param: Tensor, state: State, state_dtype: torch.dtype) -> bool:
    """Return whether a state isn't kept as state_dtype says: the group's option has changed, or the state is new, or a
    loader has put those of a checkpoint in place."""
    wanted = _dtype_kept(param, state_dtype)
    return any(state[key].dtype != wanted for key in rule.ops.rule.states if key in state)


def decoded(rule: OptimizerRule, param: Tensor, state: State) -> State:
    """Return a parameter's state, with 8-bit states decoded to fp32."""
    if "scales" not in state:
        return state
    keys = [key for key in rule.ops.rule.states if key in state]
    scales = state["scales"].view(len(keys), -1)
    values = {
        key: int8.decode(part_of(state[key]), key_scales, rule.is_squared(key))
        for key, key_scales in zip(keys, scales, strict=True)
    }
    return {key: value for key, value in (state | placed(rule, param, values)).items() if key != "scales"}


def portable(rule: OptimizerRule, param: Tensor, state: State, in_one_dtype: bool) -> State:
    """Return the state in the form that checkpoints hold. in_one_dtype: with every tensor of the parameter's shape
    widened to fp32."""
    unfit = masters.unfit(param, state)
    state = {key: value for key, value in state.items() if key not in unfit} if unfit else state
    state = decoded(rule, param, state)
    if not rule.ops.rule.saves_steps and "step" in state:  # torch's class takes any optional state as begun
        unbegun = rule.ops.rule.states[rule.ops.rule.needed :] if state["step"] == 0 else ()
        state = {key: value for key, value in state.items() if key not in ("step", *unbegun)}
    if in_one_dtype:
        narrow = {key: state[key].float() for key in rule.ops.rule.states if key in state and state[key].itemsize == 2}
        return masters.saved_in_fp32(param, state) | narrow
    if "remainder" in state:
        return state | {"remainder": masters.saved_as(param, state["remainder"])}
    return state


def _steps_so_far(rule: OptimizerRule, name: str, saved: Mapping[str, Any], group: Mapping[str, Any]) -> float:
    """Return how many steps a parameter with saved states has taken. Apex counts once for a group. Rules that don't
    count save no number, but their states have begun."""
    if "step" not in saved and "step" not in group and rule.ops.rule.saves_steps:
        raise ValueError(f"{name}: a state must have step, the number of steps so far, got {', '.join(saved)}")
    return float(saved.get("step", group.get("step", 1)))


@torch.no_grad()
def adopt(
    rule: OptimizerRule,
    name: str,
    param: Tensor,
    saved: Mapping[str, Any],
    group: Mapping[str, Any],
    state_dtype: torch.dtype,
) -> State:
    """Return our state, made from a saved state of ours, torch's, Apex's or TransformerEngine's. ``group`` is the saved
    parameter group, ``name`` the optimizer's. Masters are never rounded, the other states to state_dtype."""
    names, whole, param = rule.ops.rule.states, param, part_of(param)
    saved = decoded(rule, whole, {_ELSEWHERE.get(key, key): value for key, value in saved.items()})
    saved |= {key: part_for(whole, saved[key]) for key in (*names, *masters.KEYS.values()) if key in saved}
    keys = [*names[: rule.ops.rule.needed], *(key for key in names[rule.ops.rule.needed :] if key in saved)]
    state = _without_master(rule, param, state_dtype, keys)
    if keys:
        state["step"].fill_(_steps_so_far(rule, name, saved, group))
    for k, key in enumerate(keys):
        if "scales" in state:
            values = torch.empty_like(state[key], dtype=torch.float32).copy_(saved[key])
            codes, scales = int8.encode(values, rule.is_squared(key))
            state[key].copy_(codes)
            state["scales"].view(len(keys), -1)[k] = scales
        else:
            state[key].copy_(saved[key])
    state = placed(rule, whole, state) | masters.loaded(name, whole, saved)
    return state | {key: value for key, value in saved.items() if key not in state and key not in masters.KEYS.values()}
