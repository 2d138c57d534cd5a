"""Checks whether Masters can be put around an optimizer, by what it is, what it holds and what a trial step changes."""

import copy
import inspect
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from mpkernels._shared.parameters import refuse_unserved
from mpkernels._torch_private.sharded import is_fsdp1s
from mpkernels._torch_private.tensors import storage_of
from mpkernels.distributed.parts import parts_of
from mpkernels.optim.engine import Engine
from mpkernels.optim.group_options import refuse_quantised
from mpkernels.optim.masters import needs_master


def check(optimizer: Any) -> None:
    """Raise unless Masters can be put around this optimizer."""
    kind: Any = optimizer if isinstance(optimizer, type) else type(optimizer)
    name = _name(kind)
    if not isinstance(optimizer, Optimizer):
        what = "the class " if isinstance(optimizer, type) else ""
        raise TypeError(f"Masters: optimizer must be a torch.optim.Optimizer, got {what}{name}")
    if isinstance(optimizer, Engine):
        raise ValueError(f"Masters: optimizer must have no masters yet, got {name}, which keeps its own")
    if any(isinstance(value, Optimizer) for value in vars(optimizer).values()):
        raise ValueError(f"Masters: optimizer must not hold another one, got {name}; put Masters around the inner one")
    _, *arguments = inspect.signature(kind.step).parameters.values()
    if any(it.default is it.empty and it.kind not in (it.VAR_POSITIONAL, it.VAR_KEYWORD) for it in arguments):
        raise ValueError(
            f"Masters: optimizer must step without a closure, got {name}, which evaluates the model in its step: that "
            "would see 16-bit weights"
        )
    for group in optimizer.param_groups:
        check_group(group)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def check_group(group: dict[str, Any]) -> None:
    for key in ("differentiable", "gradient_release"):  # torch's, and optimi's for a step in the backward
        if group.get(key):
            raise ValueError(f"Masters: optimizer must have {key}=False, got {group[key]!r}")
    params = parts_of(group["params"])
    refuse_quantised("Masters", params)
    if any(map(needs_master, params)):
        refuse_unserved("Masters", "params", params)  # such a tensor's memory can't be exchanged for fp32
    if any(map(is_fsdp1s, group["params"])):
        raise ValueError("Masters: params must not be FullyShardedDataParallel's; shard the model by fully_shard")


def refuse_one_that_holds(optimizer: Any, params: Sequence[Tensor]) -> None:
    """Raise if the optimizer keeps some of these 16-bit parameters, their ids or their memory elsewhere than in its
    groups: its step would find them there instead of fp32 ones."""
    marks = set(chain.from_iterable(map(_marks, params)))
    known = {id(group["params"]) for group in optimizer.param_groups}  # an attribute may be such a list itself
    options = [value for group in optimizer.param_groups for key, value in group.items() if key != "params"]
    kept = {**vars(optimizer), "param_groups": options, "state": list(optimizer.state.values())}
    for name, value in kept.items():
        if not marks.isdisjoint(chain.from_iterable(map(_marks, _all_in(value, known)))):
            raise ValueError(
                f"Masters: optimizer must find its 16-bit parameters in the groups' params alone, got "
                f"{_name(type(optimizer))}, whose {name} holds some of them, too, and would have them stepped unseen"
            )


def _marks(value: Any) -> Iterator[int]:
    """Yield numbers by which a value is known as a parameter, its id, or another tensor over its memory."""
    yield value if type(value) is int else id(value)
    if type(value) in (Tensor, Parameter) and value.layout is torch.strided:
        yield storage_of(value)


def _all_in(value: Any, known: set[int], looks_into_objects: bool = True) -> Iterator[Any]:
    """Yield the value and all that its containers hold. Of an object, yield its attributes, but not theirs."""
    if id(value) in known:
        return
    known.add(id(value))
    yield value
    inner: Any = ()
    if isinstance(value, Mapping):
        inner = chain(value.keys(), value.values())
    elif isinstance(value, list | tuple | set | frozenset | deque):
        inner = value
    elif isinstance(value, Module):
        inner = value.parameters()
    elif looks_into_objects and not isinstance(value, Tensor | type) and not callable(value):
        inner, looks_into_objects = getattr(value, "__dict__", {}).values(), False
    for it in list(inner):
        yield from _all_in(it, known, looks_into_objects)


def refuse_one_that_remembers_steps(optimizer: Any, option: str, also_in_groups: bool = False) -> None:
    """Raise if a step changes an attribute of the optimizer, such as a count of steps, or, if that counts, a value of a
    group: in several calls for one step, that would change once a call."""
    attributes, values = _changed_by_steps(optimizer)
    if changed := attributes + [f"a group's {value}" for value in values if also_in_groups]:
        where = "state" if also_in_groups else "state and param_groups"
        raise ValueError(
            f"Masters: optimizer must remember its steps in {where} alone for {option}, got "
            f"{_name(type(optimizer))}, whose step changes {', '.join(changed)}"
        )


def copy_with_group(optimizer: Any, group: dict[str, Any], state: Any) -> Any:
    """Return an optimizer with the same attributes, without hooks, that has this group alone."""
    copied = object.__new__(type(optimizer))
    hooks = [key for key in vars(optimizer) if key.endswith("_hooks")]
    vars(copied).update({key: it for key, it in vars(optimizer).items() if key != "step"})
    vars(copied).update({key: OrderedDict() for key in hooks})
    copied.param_groups, copied.state = [group], state
    return copied


def _changed_by_steps(optimizer: Any) -> tuple[list[str], list[str]]:
    """Return the attributes and the group's values that a copy of the optimizer changes when it steps a small parameter
    for the second time. A first step may set up what later ones leave alone."""
    params = [(group, param) for group in optimizer.param_groups for param in group["params"]]
    if not params:
        return [], []
    group, param = min(params, key=lambda it: it[1].numel())
    param = Parameter(torch.ones_like(param, dtype=torch.float32))
    copied = copy_with_group(optimizer, {**group, "params": [param]}, defaultdict(dict))
    for values in (vars(copied), copied.param_groups[0]):
        values.update(
            {key: _copied(it, {id(optimizer): copied}) for key, it in values.items() if key not in _NOT_COPIED}
        )

    def step() -> tuple[dict[str, Any], dict[str, Any]]:
        param.grad = torch.ones_like(param)
        type(copied).step(copied)
        found = vars(copied), copied.param_groups[0]
        attributes, values = ({key: _contents(it) for key, it in of.items() if key not in _NOT_COPIED} for of in found)
        return attributes, values

    with torch.random.fork_rng(devices=[]):
        before, after = step(), step()
    return _differences(before[0], after[0]), _differences(before[1], after[1])


_NOT_COPIED = "params", "param_groups", "state"


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return a copy, or the value itself where it can't be copied, as a process group can't."""
    try:
        return copy.deepcopy(value, memo)
    except (TypeError, RuntimeError, NotImplementedError):
        return value


def _differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [key for key, it in after.items() if key not in before or not _are_equal(before[key], it)]


def _contents(value: Any) -> Any:
    """Return the numbers in containers as they are now; an object is what it is."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _contents(it) for key, it in value.items()}
    return list(map(_contents, value)) if isinstance(value, list | tuple | deque) else value


def _are_equal(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return torch.equal(value, other)
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(_are_equal(it, other[key]) for key, it in value.items())
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(_are_equal, value, other))
    return value is other or bool(value == other)
