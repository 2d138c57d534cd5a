"""Saves and loads an optimizer's state. Unlike torch, loading doesn't round a state to its parameter's dtype:
param_state.py converts it."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from mpkernels._torch_private.sharded import is_fsdp1s
from mpkernels.ops.step.rule import Rule
from mpkernels.optim import group_options, param_state
from mpkernels.optim.offload import home_of

_MASTERS = ("remainder", "master", "master_param")
# What torch's optimizers and ours keep for a parameter. A load refuses what its own rule doesn't keep.
_KNOWN_STATES = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "exp_inf", "mu_product"}


@contextmanager
def saving(optimizer: Any) -> Iterator[None]:
    """Make torch's state_dict, called inside this context, return portable states. The user's hooks run after ours."""

    def make_plain(_: Optimizer, saved: dict[str, Any]) -> None:
        states = saved["state"]  # a user may keep something else there, too
        for group, packed in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            packed["state_dtype"] = str(group["state_dtype"])  # torch.distributed.checkpoint takes no dtype
            for param, number in zip(group["params"], packed["params"], strict=True):
                if number in states:
                    states[number] = param_state.portable(optimizer._rule, param, states[number], is_fsdp1s(param))

    hook = optimizer.register_state_dict_post_hook(make_plain, prepend=True)
    try:
        yield
    finally:
        hook.remove()


class _Adopted:
    """A state on its way through torch's load_state_dict, which would round the tensors in a dict."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state


@contextmanager
def loading(optimizer: Any) -> Iterator[None]:
    """Make torch's load_state_dict, called inside this context, load exact states. The optimizer's own master and
    state_dtype apply, not those of the checkpoint. The user's hooks run before ours."""
    name = type(optimizer).__name__
    op, rule = f"{name}.load_state_dict", optimizer._rule

    def adopt(_: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
        refuse_other_dict(op, loaded)
        states, groups = dict(loaded["state"]), []
        if [len(it["params"]) for it in loaded["param_groups"]] != [len(it["params"]) for it in optimizer.param_groups]:
            return loaded  # torch refuses it
        for i, (group, saved) in enumerate(zip(optimizer.param_groups, loaded["param_groups"], strict=True)):
            _refuse_twice(op, saved["params"])
            groups.append(saved | {key: group[key] for key in group_options.GROUP_OPTIONS})
            for param, number in zip(group["params"], saved["params"], strict=True):
                if states.get(number) and not isinstance(states[number], _Adopted):  # an interrupted load left its hook
                    state = {key: it for key, it in states[number].items() if it is not None}  # SGD saves None
                    _check(op, rule.ops.rule, number, state, param)
                    with home_of(optimizer, param) as home:
                        made = param_state.adopt(rule, name, home, state, saved, group["state_dtype"])
                    states[number] = _Adopted(made)
            _refuse_other_group(op, optimizer, i, saved)
        return loaded | {"state": states, "param_groups": groups}

    hook = optimizer.register_load_state_dict_pre_hook(adopt)
    try:
        yield
    finally:
        hook.remove()


def taken_over(state: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes that ``__setstate__`` sets, for what it is given: by a pickle or a copy the attributes
    themselves; by torch's load_state_dict states and groups, among which are the adopted states."""
    if state.keys() != {"state", "param_groups"}:
        return state
    states = {key: it.state if isinstance(it, _Adopted) else it for key, it in state["state"].items()}
    return state | {"state": defaultdict(dict, states), "_is_loaded": True}


def refuse_no_dict(op: str, name: str, given: object) -> None:
    if not isinstance(given, Mapping):
        raise TypeError(f"{op}: {name} must be a dict, got {type(given).__name__}")


def refuse_other_dict(op: str, loaded: dict[str, Any]) -> None:
    """Raise if this is no optimizer's state dict, but a model's, for example."""
    refuse_no_dict(op, "state_dict", loaded)
    if not {"state", "param_groups"} <= loaded.keys():
        got = ", ".join(map(str, list(loaded)[:5])) or "an empty dict"
        raise ValueError(f"{op}: state_dict must have state and param_groups, got {got}")
    refuse_no_dict(op, "state", loaded["state"])
    if not isinstance(groups := loaded["param_groups"], list | tuple):
        raise TypeError(f"{op}: param_groups must be a list, got {type(groups).__name__}")


def _refuse_other_group(op: str, optimizer: Any, i: int, saved: dict[str, Any]) -> None:
    """Raise if a saved group lacks a number that the steps need, because another class saved it, for example. torch's
    classes complete the switches that their older versions didn't have."""
    switches = {key: value for key, value in optimizer.defaults.items() if isinstance(value, bool | None)}
    try:
        optimizer._rule.hyperparameters(switches | saved)
    except KeyError as error:
        raise ValueError(f"{op}: param_groups[{i}] must have {error.args[0]}, got {', '.join(saved)}") from None


def _refuse_twice(op: str, numbers: list[Any]) -> None:
    if twice := [number for number, times in Counter(numbers).items() if times > 1]:
        raise ValueError(f"{op}: a group must hold each parameter once, got {twice} twice")


def _check(op: str, rule: Rule, number: object, state: dict[str, Any], param: Tensor) -> None:
    needed = rule.states[: rule.needed]
    if not set(needed) <= state.keys():
        wanted, got = " and ".join(needed), ", ".join(map(str, state))
        raise ValueError(f"{op}: state[{number!r}] must have {wanted}, got {got}")
    if foreign := sorted(_KNOWN_STATES.intersection(state).difference(rule.states)):
        raise ValueError(f"{op}: state[{number!r}] must be of the same rule, got another's: {', '.join(foreign)}")
    for key in (*rule.states, *_MASTERS):
        if key in state and not isinstance(state[key], Tensor):
            raise TypeError(f"{op}: state[{number!r}][{key!r}] must be a tensor, got {type(state[key]).__name__}")
        if key in state and state[key].shape != param.shape:
            raise ValueError(
                f"{op}: state[{number!r}][{key!r}] must have its parameter's shape "
                f"{tuple(param.shape)}, got {tuple(state[key].shape)}"
            )
