"""Restores the state of modules, optimizers and other objects, of which this process may hold a part."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from mpkernels._shared.tensors_in import tensors_in
from mpkernels._torch_private.modules import books_of
from mpkernels.distributed.parts import part_of, reshard


@contextmanager
def restored(objects: Iterable[Any], device: torch.device) -> Iterator[None]:
    """When the context ends, restore the state of modules (with grads), of other objects with a ``state_dict``, and of
    torch's random numbers."""
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        for thing in objects:
            restore_at_end(stack, thing)
            if isinstance(thing, nn.Module):
                stack.callback(reshard, thing)
                stack.callback(_set_grads, [(param, param.grad) for param in thing.parameters()])
                thing.zero_grad()
        yield


def _set_grads(grads: list[tuple[Tensor, Tensor | None]]) -> None:
    for param, grad in grads:
        param.grad = grad


def restore_at_end(stack: ExitStack, thing: Any) -> None:
    """Have the stack, when it ends, restore the object's present state, except grads. Until then, the host keeps a copy
    of the object's tensors."""
    if isinstance(thing, nn.Module):
        modules = list(thing.modules())
        for module in modules:
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                stack.callback(module.set_extra_state, copy.deepcopy(module.get_extra_state()))
        dicts = [book for module in modules for book in (*books_of(vars(module)), vars(module))]
        tensors = [value for book in dicts for value in book.values() if isinstance(value, Tensor)]
        tensors += thing.buffers()  # a traced module has its own in no dict
    elif isinstance(thing, Optimizer):
        dicts = [vars(thing), thing.state, *thing.param_groups]  # type: ignore[list-item]
        attributes = {key: value for key, value in vars(thing).items() if key != "param_groups"}
        groups = [{key: value for key, value in group.items() if key != "params"} for group in thing.param_groups]
        tensors = [*tensors_in([attributes, groups])]
        for inner in attributes.values():
            if isinstance(inner, Optimizer):  # in a wrapper
                restore_at_end(stack, inner)
    else:
        stack.callback(thing.load_state_dict, copy.deepcopy(thing.state_dict()))
        return
    for entries in dicts:
        if isinstance(entries, dict):
            stack.callback(_refill, entries, dict(entries))
    for tensor in {id(tensor): tensor for tensor in tensors if _is_writable(tensor)}.values():
        stack.callback(_write, tensor, part_of(tensor.detach()).to("cpu", copy=True))


def _refill(entries: dict[Any, Any], before: dict[Any, Any]) -> None:
    entries.clear()
    entries.update(before)


@torch.no_grad()
def _write(tensor: Tensor, before: Tensor) -> None:
    part_of(tensor).copy_(before)  # copy_ to a detached COO tensor would replace its parts, not ours


def _is_writable(tensor: Tensor) -> bool:
    """Return whether copy_ can write to the tensor. It can't write to an expanded one, whose elements share memory."""
    is_expanded = tensor.layout == torch.strided and not tensor.is_nested and 0 in tensor.stride()
    return not (tensor.is_nested or tensor.is_mkldnn or is_lazy(tensor) or tensor.is_meta or is_expanded)
