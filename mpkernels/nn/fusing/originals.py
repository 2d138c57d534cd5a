"""Keeps torch's classes and functions as they were when this module was imported, and tells whether somebody has
replaced one since. A fused model must call the replacement, too, so it then runs the plain lines."""

import os
from collections.abc import Sequence
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mpkernels._torch_private.modules import CALLED_BY

_HOME = os.path.dirname(torch.__file__)
Attribute = tuple[Any, str, Any]
"""A module or class, the name of its attribute, and the attribute's original value."""


def _original(owner: Any, name: str) -> Any:
    """Return an attribute of torch's. If somebody has already replaced it, return an object that equals nothing."""
    value = getattr(owner, name)
    is_foreign = isinstance(value, FunctionType) and not value.__code__.co_filename.startswith(_HOME)
    return object() if is_foreign else value


def _originals(*attributes: tuple[Any, str]) -> tuple[Attribute, ...]:
    return tuple((owner, name, _original(owner, name)) for owner, name in attributes)


def are_in_place(attributes: Sequence[Attribute]) -> bool:
    for owner, name, original in attributes:  # noqa: SIM110 (a generator takes as long as the rest)
        if getattr(owner, name) is not original:
            return False
    return True


_CALL = [(name, _original(nn.Module, name)) for name in CALLED_BY]


def _of_module(kind: type, forward: Any, functions: Sequence[Attribute]) -> tuple[Attribute, ...]:
    return ((kind, "forward", forward), *((kind, *attribute) for attribute in _CALL), *functions)


def _module(kind: type, *functions: tuple[Any, str]) -> tuple[Attribute, ...]:
    return _of_module(kind, _original(kind, "forward"), _originals(*functions))


_TANH_OF_CUBE = ((torch, "tanh"), (torch, "pow"))
# The functions that a call of each module or function runs, by the sources of torch 2.13, transformers 5.24 and
# diffusers 0.42.
_RUNS: dict[object, tuple[Attribute, ...]] = {
    nn.Linear: _module(nn.Linear, (functional, "linear")),
    nn.Dropout: _module(nn.Dropout, (functional, "dropout")),
    nn.Identity: _module(nn.Identity),
    nn.ReLU: _module(nn.ReLU, (functional, "relu"), (torch, "relu"), (torch, "relu_")),
    nn.GELU: _module(nn.GELU, (functional, "gelu")),
    nn.SiLU: _module(nn.SiLU, (functional, "silu")),
    nn.Sigmoid: _module(nn.Sigmoid, (torch, "sigmoid")),
    nn.Tanh: _module(nn.Tanh, (torch, "tanh")),
    functional.relu: _originals((torch, "relu")),
    functional.sigmoid: _originals((Tensor, "sigmoid")),
    functional.tanh: _originals((Tensor, "tanh")),
}
_FUNCTIONS_IN_LIBRARIES: dict[str, tuple[tuple[Any, str], ...]] = {
    "Conv1D": ((torch, "addmm"), (Tensor, "view"), (Tensor, "size")),
    "ReLUSquaredActivation": ((functional, "relu"), (torch, "relu"), (torch, "square")),
    "SiLUActivation": ((functional, "silu"),),
    "GELUActivation": ((functional, "gelu"), (torch, "erf")),
    **dict.fromkeys(("GELUTanh", "PytorchGELUTanh"), ((functional, "gelu"), *_TANH_OF_CUBE)),
    **dict.fromkeys(("GELU", "GEGLU"), ((functional, "gelu"),)),  # diffusers' own
    **dict.fromkeys(("NewGELUActivation", "FastGELUActivation", "AccurateGELUActivation"), _TANH_OF_CUBE),
}
_IN_LIBRARIES = {name: _originals(*functions) for name, functions in _FUNCTIONS_IN_LIBRARIES.items()}
_known_runs: dict[type, tuple[Attribute, ...]] = {}  # filled when a class is first met
GATE = _originals((Tensor, "__mul__"))
SQUARE = _originals((Tensor, "square"), (Tensor, "pow"), (Tensor, "__pow__"))
CHUNK = _originals((Tensor, "chunk"), (torch, "chunk"))

TORCH_CHUNK = _original(torch, "chunk")
DROPOUT = _original(functional, "dropout")
GELU = _original(functional, "gelu")
MODULE_GETATTR = _original(nn.Module, "__getattr__")
SEQUENTIAL_ITER = _original(nn.Sequential, "__iter__")
LIST_ITER = _original(nn.ModuleList, "__iter__")


def is_original(called: Any, kind: Any = None) -> bool:
    """Return whether a linear layer, an activation or a dropout computes what torch, transformers or diffusers define.
    ``called`` is a module, or a function of torch. ``kind`` is the plain class of a fused module."""
    kind = kind or type(called)
    runs = _RUNS.get(kind)
    if runs is not None:
        return are_in_place(runs)
    if not isinstance(called, nn.Module):
        return are_in_place(_RUNS.get(called, ()))
    runs = _known_runs.get(kind)
    if runs is None:
        runs = _runs_of(kind)
        if runs is None:
            return False  # without a note in _known_runs, because a patch may be undone
        _known_runs[kind] = runs
    return are_in_place(runs) and _is_inner_original(called)


def _runs_of(kind: type) -> tuple[Attribute, ...] | None:
    """Return what a call of a library's module runs: its forward, the methods that this names, and torch's functions.
    None if the forward or one of these methods doesn't stand in the class's own file."""
    forward: Any = vars(kind).get("forward")
    is_own = (
        isinstance(forward, FunctionType)
        and (forward.__qualname__, forward.__module__) == (f"{kind.__qualname__}.forward", kind.__module__)
        and forward.__globals__.get("__file__") == forward.__code__.co_filename
    )
    names = forward.__code__.co_names if is_own else ()
    methods = [(kind, name, vars(kind)[name]) for name in names if isinstance(vars(kind).get(name), FunctionType)]
    if not is_own or any(method.__globals__ is not forward.__globals__ for _, _, method in methods):
        return None
    return _of_module(kind, forward, (*_IN_LIBRARIES.get(kind.__name__, ()), *methods))


def _is_inner_original(module: nn.Module) -> bool:
    """Return whether ``act``, a function that some activations of transformers hold, comes from their class."""
    act = vars(module).get("act")
    if isinstance(act, MethodType):
        return act.__self__ is module and act.__func__ is getattr(type(module), act.__name__, None)
    return act is None or act is GELU or getattr(act, "func", None) is GELU
