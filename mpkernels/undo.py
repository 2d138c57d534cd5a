"""Restores modules, optimizers and other objects to an earlier state."""

import copy
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from mpkernels._torch_private.modules import books_of
from mpkernels.distributed.parts import part_of

Undo = Callable[[], None]
_NO_EXTRA = nn.Module.get_extra_state


def undo_of(thing: Any) -> Undo:
    """Return a function that restores the object's present state, except grads. As long as the function lives, the host
    keeps a copy of the object's tensors."""
    if isinstance(thing, nn.Module):
        return _undo_of_module(thing)
    if isinstance(thing, Optimizer):
        return _undo_of_optimizer(thing)
    return partial(thing.load_state_dict, copy.deepcopy(thing.state_dict()))


def _undo_of_module(module: nn.Module) -> Undo:
    modules = list(module.modules())
    dicts = [book for it in modules for book in (*books_of(vars(it)), vars(it))]
    tensors = [value for book in dicts for value in book.values() if isinstance(value, Tensor)]
    undo_dicts = _undo_of_dicts(dicts, tensors)
    extra = [(it, copy.deepcopy(it.get_extra_state())) for it in modules if type(it).get_extra_state is not _NO_EXTRA]

    def undo() -> None:
        undo_dicts()
        for owner, state in extra:
            owner.set_extra_state(state)

    return undo


def _undo_of_optimizer(optimizer: Optimizer) -> Undo:
    inner = [_undo_of_optimizer(it) for it in vars(optimizer).values() if isinstance(it, Optimizer)]  # in a wrapper
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    attributes = {key: value for key, value in vars(optimizer).items() if key != "param_groups"}
    tensors = _tensors_in([attributes, groups])
    undo_dicts = _undo_of_dicts([vars(optimizer), optimizer.state, *optimizer.param_groups], tensors)

    def undo() -> None:
        for undo_part in (*inner, undo_dicts):
            undo_part()

    return undo


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for it in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(it)


def _undo_of_dicts(dicts: Iterable[Any], tensors: Iterable[Tensor]) -> Undo:
    """Return a function that restores the dicts' entries and the tensors' numbers."""
    entries = [(it, dict(it)) for it in dicts if isinstance(it, dict)]
    written = list({id(it): it for it in tensors if _is_writable(it)}.values())
    values = [part_of(it.detach()).to("cpu", copy=True) for it in written]

    @torch.no_grad()
    def undo() -> None:
        for tensor, value in zip(written, values, strict=True):
            part_of(tensor).copy_(value)  # copy_ to a detached COO tensor would replace its parts, not ours
        for entry, before in entries:
            entry.clear()
            entry.update(before)

    return undo


def _is_writable(tensor: Tensor) -> bool:
    """Return whether copy_ can write to the tensor. It can't write to an expanded one, whose elements share memory."""
    is_expanded = tensor.layout == torch.strided and not tensor.is_nested and 0 in tensor.stride()
    return not (tensor.is_nested or tensor.is_mkldnn or is_lazy(tensor) or tensor.is_meta or is_expanded)
