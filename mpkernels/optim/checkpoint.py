"""Saving and loading an optimizer's state. Unlike torch, loading doesn't round a state to its parameter's dtype."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from mpkernels._torch_private.optimizers import hooks_of_loading
from mpkernels._torch_private.sharded import is_fsdp1s
from mpkernels.ops.step.rule import Rule
from mpkernels.optim import group_options, param_state
from mpkernels.optim.offload import home_of

_MASTERS = ("remainder", "master", "master_param")


@contextmanager
def saving(optimizer: Any) -> Iterator[None]:
    """Make torch's state_dict, called inside this context, return portable states. The user's hooks run after ours."""

    def make_plain(_: Optimizer, saved: dict[str, Any]) -> None:
        states = saved["state"]  # a user may keep something else there, too
        for group, packed in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            packed["state_dtype"] = str(group["state_dtype"])  # torch.distributed.checkpoint takes no dtype
            for param, number in zip(group["params"], packed["params"], strict=True):
                if number in states:
                    home = home_of(optimizer, param)
                    states[number] = param_state.portable(optimizer._rule, home, states[number], is_fsdp1s(param))

    hook = optimizer.register_state_dict_post_hook(make_plain, prepend=True)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def loading(optimizer: Any) -> Iterator[Any]:
    """Yield a stand-in for the optimizer, to call torch's load_state_dict on inside this context. At its end, the
    optimizer takes over what was loaded, in one assignment; after an error, it is as it was before.

    The states come as they were before torch casts them, and the optimizer's own master and state_dtype apply, not
    those of the checkpoint."""
    kind = type(optimizer)
    stand_in: Any = object.__new__(kind)
    op = f"{kind.__name__}.load_state_dict"
    states_to_adopt: list[tuple[Tensor, dict[str, Any], dict[str, Any], dict[str, Any]]] = []

    def remember(_: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
        vars(stand_in).update(_without(hooks, optimizer))  # which the user's hooks may have changed
        states, groups = dict(loaded["state"]), loaded["param_groups"]
        if [len(it["params"]) for it in groups] != [len(it["params"]) for it in optimizer.param_groups]:
            return loaded  # torch refuses it
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            _refuse_twice(op, saved["params"])
            for param, number in zip(group["params"], saved["params"], strict=True):
                if states.get(number):
                    states[number] = {key: it for key, it in states[number].items() if it is not None}  # SGD saves None
                    _check(op, optimizer._rule.ops.rule, number, states[number], param)
                    states_to_adopt.append((param, states[number], saved, group))
                    # torch insists on nothing else. Apex and TransformerEngine count once for the group.
                    states[number] = {"step": states[number].get("step", 0.0)}
        return loaded | {"state": states}

    def of_users(hook: Any) -> Any:
        return lambda _, loaded: hook(optimizer, loaded)

    before, after = hooks = hooks_of_loading(optimizer)
    Optimizer.__setstate__(stand_in, _without(hooks, optimizer))
    for hook in (*map(of_users, before.values()), remember):
        stand_in.register_load_state_dict_pre_hook(hook)
    own_hooks = hooks_of_loading(stand_in)
    try:
        yield stand_in
        for new, group in zip(stand_in.param_groups, optimizer.param_groups, strict=True):
            new.update({key: group[key] for key in group_options.OF_GROUPS})
        for param, state, saved, group in states_to_adopt:
            stand_in.state[param] = param_state.adopt(
                optimizer._rule, kind.__name__, home_of(optimizer, param), state, saved, group["state_dtype"]
            )
        stand_in._is_loaded = True
        vars(optimizer).update(_without(own_hooks, stand_in))
    finally:  # the stand-in and its hook hold each other, and with them all that was loaded
        states_to_adopt.clear()
        vars(stand_in).clear()
    for hook in after.values():
        hook(optimizer)


def _without(hooks: tuple[Any, ...], optimizer: Any) -> dict[str, Any]:
    return {key: value for key, value in vars(optimizer).items() if not any(value is each for each in hooks)}


def _refuse_twice(op: str, numbers: list[Any]) -> None:
    if twice := [number for number, times in Counter(numbers).items() if times > 1]:
        raise ValueError(f"{op}: a group must hold each parameter once, got {twice} twice")


def _check(op: str, rule: Rule, number: object, state: dict[str, Any], param: Tensor) -> None:
    needed = rule.states[: rule.needed]
    if not set(needed) <= state.keys():
        wanted, got = " and ".join(needed), ", ".join(map(str, state))
        raise ValueError(f"{op}: state[{number!r}] must have {wanted}, got {got}")
    for key in (*rule.states, *_MASTERS):
        if key in state and state[key].shape != param.shape:
            raise ValueError(
                f"{op}: state[{number!r}][{key!r}] must have its parameter's shape "
                f"{tuple(param.shape)}, got {tuple(state[key].shape)}"
            )
