"""Saving and loading AdamW's state. Unlike torch, loading doesn't round a state to its parameter's dtype."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mpkernels._torch_private import is_fsdp1s
from mpkernels.optim import group_options, param_state

_SHAPED = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "remainder", "master", "master_param")


@contextmanager
def saving(optimizer: Optimizer) -> Iterator[None]:
    """Make torch's state_dict, called inside this context, return portable states. The user's hooks run after ours."""

    def make_plain(_: Optimizer, saved: dict[str, Any]) -> None:
        states = saved["state"]  # where a user may keep something else, too
        for group, packed in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            packed["state_dtype"] = str(group["state_dtype"])  # torch.distributed.checkpoint takes no dtype
            for param, number in zip(group["params"], packed["params"], strict=True):
                if number in states:
                    states[number] = param_state.portable(param, states[number], is_fsdp1s(param))

    hook = optimizer.register_state_dict_post_hook(make_plain, prepend=True)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def loading(optimizer: Any) -> Iterator[None]:
    """Make torch's load_state_dict, called inside this context, take the states as they were before torch casts them.
    The optimizer's own master and state_dtype apply, not those of the checkpoint."""
    states_to_adopt: list[tuple[Tensor, dict[str, Any], dict[str, Any]]] = []
    options = [{key: group[key] for key in group_options.OF_GROUPS} for group in optimizer.param_groups]

    def remember(_: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
        states = dict(loaded["state"])
        for group, saved in zip(optimizer.param_groups, loaded["param_groups"], strict=False):  # torch compares lengths
            for param, number in zip(group["params"], saved["params"], strict=False):
                if states.get(number):
                    _check(number, states[number], param)
                    states_to_adopt.append((param, states[number], saved))
                    # torch insists on a step, where Apex and TransformerEngine count once for the group.
                    states[number] = {"step": 0.0} | states[number]
        return loaded | {"state": states}

    def adopt(_: Optimizer) -> None:
        dtypes: dict[Tensor, torch.dtype] = {}
        for group, own in zip(optimizer.param_groups, options, strict=True):
            group.update(own)
            dtypes |= dict.fromkeys(group["params"], own["state_dtype"])
        for param, state, saved in states_to_adopt:
            optimizer.state[param] = param_state.adopt(param, state, saved, dtypes[param])
        optimizer._start_afresh()
        optimizer._is_loaded = True

    last = optimizer.register_load_state_dict_pre_hook(remember)
    first = optimizer.register_load_state_dict_post_hook(adopt, prepend=True)  # of all that come after torch's casts
    try:
        yield
    finally:
        last.remove()
        first.remove()


def _check(number: object, state: dict[str, Any], param: Tensor) -> None:
    if not {"exp_avg", "exp_avg_sq"} <= state.keys():
        got = ", ".join(map(str, state))
        raise ValueError(f"AdamW.load_state_dict: state[{number!r}] must have exp_avg and exp_avg_sq, got {got}")
    for key in _SHAPED:
        if key in state and state[key].shape != param.shape:
            raise ValueError(
                f"AdamW.load_state_dict: state[{number!r}][{key!r}] must have its parameter's shape "
                f"{tuple(param.shape)}, got {tuple(state[key].shape)}"
            )
