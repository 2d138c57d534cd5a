"""fp32 stand-ins for 16-bit parameters, for the time in which an optimizer of any class steps or loads."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from mpkernels._shared.parameters import is_sharded
from mpkernels._torch_private.ops import foreach_copy_, foreach_mul_
from mpkernels.distributed.parts import part_of, parts_of, placed_as
from mpkernels.ops.step.split import join_each, split_each
from mpkernels.optim.masters import needs_master


def step_group(optimizer: Any, group: dict[str, Any], factor: float) -> None:
    """Have the optimizer step one of its groups, with grads that are multiplied by the factor. The optimizer steps fp32
    weights in place of 16-bit parameters, whose states must hold remainders; then the weights are rounded. If the step
    raises, what it has done so far is kept, as with fp32 parameters."""
    params, state, groups = list(group["params"]), optimizer.state, optimizer.param_groups
    moving = [param for param in params if param.grad is not None]
    narrow = [param for param in moving if needs_master(param)]
    stand_ins = {param: blank(param) for param in params if param.grad is None and needs_master(param)}
    stand_ins |= zip(narrow, _wide(narrow, [state[param]["remainder"] for param in narrow], factor), strict=True)
    grads = {param: param.grad for param in moving if param not in stand_ins and factor != 1}
    remainders = {param: state[param].pop("remainder") for param in narrow}  # optimizers test whether a state is empty
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
        _round([stand_ins[param] for param in narrow], narrow, list(remainders.values()))


@contextmanager
def renamed(optimizer: Any, stand_ins: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Inside this context, have the optimizer's groups and states hold stand-ins instead of parameters. Setting a
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


def _wide(params: Sequence[Tensor], remainders: Sequence[Tensor], factor: float) -> list[Parameter]:
    weights = join_each(parts_of([param.detach() for param in params]), parts_of(remainders))
    stand_ins = [_stand_in(param, placed_as(param, weight)) for param, weight in zip(params, weights, strict=True)]
    grads = _wide_grads(parts_of([param.grad for param in params]), factor)
    for param, stand_in, grad in zip(params, stand_ins, grads, strict=True):
        stand_in.grad = placed_as(param, grad)
    return stand_ins


def _wide_grads(grads: list[Tensor], factor: float) -> list[Tensor]:
    if not grads or any(it.layout is not torch.strided for it in grads):  # foreach ops refuse an empty list
        return [it.float() * factor for it in grads]
    # Copies, also of fp32 grads: what follows must not change the user's.
    wide = [torch.empty_like(it, dtype=torch.float32) for it in grads]
    foreach_copy_(wide, grads)
    if factor != 1:
        foreach_mul_(wide, factor)
    return wide


def _stand_in(param: Tensor, weight: Tensor) -> Parameter:
    stand_in = Parameter(weight, requires_grad=param.requires_grad)
    vars(stand_in).update(vars(param) | vars(stand_in))  # some classes read what users have noted on a parameter
    return stand_in


def _round(stand_ins: Sequence[Tensor], params: Sequence[Tensor], remainders: Sequence[Tensor]) -> None:
    masters, weights = (parts_of([it.detach() for it in tensors]) for tensors in (stand_ins, params))
    split_each(masters, weights, parts_of(remainders))
    for param in params:
        if is_sharded(param):
            torch.autograd.graph.increment_version(param)
