"""fp32 stand-ins for 16-bit parameters, for the time in which an optimizer of any class steps or loads."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from mpkernels.distributed.parts import part_of, placed_as
from mpkernels.ops.step.split import join, split
from mpkernels.optim.masters import needs_master
from mpkernels.parameters import is_sharded


def step_group(optimizer: Any, group: dict[str, Any], factor: float) -> None:
    """Have the optimizer step one of its groups, with grads that are multiplied by the factor. In place of 16-bit
    parameters, whose states must hold remainders, it steps fp32 weights; then these are rounded. If it raises, what it
    has done so far is kept, as with fp32 parameters."""
    params, state, groups = list(group["params"]), optimizer.state, optimizer.param_groups
    moving = [param for param in params if param.grad is not None]
    narrow = [param for param in moving if needs_master(param)]
    stand_ins = {param: blank(param) for param in params if param.grad is None and needs_master(param)}
    stand_ins |= {param: _wide(param, state[param]["remainder"], factor) for param in narrow}
    grads = {param: param.grad for param in moving if param not in stand_ins and factor != 1}
    remainders = {param: state[param].pop("remainder") for param in narrow}  # classes ask whether a state is empty
    try:
        for param, grad in grads.items():
            param.grad = placed_as(param, part_of(grad) * factor)
        optimizer.param_groups = [group]
        with renamed(optimizer, stand_ins):
            optimizer.step()
    finally:
        optimizer.param_groups = groups
        for param, grad in grads.items():
            param.grad = grad
        for param, remainder in remainders.items():
            optimizer.state.setdefault(param, {})["remainder"] = remainder
            _round(stand_ins.pop(param), param, remainder)


@contextmanager
def renamed(optimizer: Any, stand_ins: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Inside this context, have the optimizer's groups and states hold stand-ins instead of parameters. To set a
    parameter's ``data`` to fp32 instead would take DDP's hooks off it."""
    try:
        _rename(optimizer, stand_ins)
        yield
    finally:
        _rename(optimizer, {stand_in: param for param, stand_in in stand_ins.items()})


def _rename(optimizer: Any, names: Mapping[Tensor, Tensor]) -> None:
    for group in optimizer.param_groups:
        group["params"][:] = [names.get(it, it) for it in group["params"]]
    for old, new in names.items():
        if old in optimizer.state:
            optimizer.state[new] = optimizer.state.pop(old)


def blank(param: Tensor) -> Parameter:
    """Return a stand-in without memory, for a parameter that doesn't move."""
    return _stand_in(param, torch.empty((), dtype=torch.float32, device=param.device).expand(param.shape))


def _wide(param: Tensor, remainder: Tensor, factor: float) -> Parameter:
    weight, grad = join(part_of(param.detach()), part_of(remainder)), part_of(param.grad).float()
    stand_in = _stand_in(param, placed_as(param, weight))
    stand_in.grad = placed_as(param, grad if factor == 1 else grad * factor)
    return stand_in


def _stand_in(param: Tensor, weight: Tensor) -> Parameter:
    stand_in = Parameter(weight, requires_grad=param.requires_grad)
    vars(stand_in).update(vars(param) | vars(stand_in))  # some classes read what users have noted on a parameter
    return stand_in


def _round(stand_in: Tensor, param: Tensor, remainder: Tensor) -> None:
    weight, rest = split(part_of(stand_in.detach()), param.dtype)
    part_of(param.detach()).copy_(weight)
    part_of(remainder).copy_(rest)
    if is_sharded(param):
        torch.autograd.graph.increment_version(param)
