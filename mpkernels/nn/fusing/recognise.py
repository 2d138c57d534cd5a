"""Recognises linear layers, activations and dropouts, and says why no op of ours can stand for one."""

from collections.abc import Sequence
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.jit import ScriptModule
from torch.nn import Conv1d, Conv2d, Conv3d, Dropout, Identity, Linear, Module, Parameter, functional

from mpkernels._shared.parameters import is_sharded
from mpkernels._torch_private.modules import books_of, runs_forward_alone
from mpkernels.nn.fusing.originals import DROPOUT, GELU, is_original
from mpkernels.nn.fusing.safe_lookup import own_values
from mpkernels.ops.linear.activations import ACTIVATIONS, module_activation

_FUNCTIONS: dict[object, str] = {
    **dict.fromkeys((torch.relu, functional.relu), "relu"),
    functional.gelu: "gelu",
    functional.silu: "silu",
    **dict.fromkeys((torch.sigmoid, functional.sigmoid), "sigmoid"),
    **dict.fromkeys((torch.tanh, functional.tanh), "tanh"),
}


def known_activation(value: object) -> str | None:
    """Return the name in ACTIVATIONS for a name, a module or a function of torch. Return None for anything else."""
    if type(value) is str:
        return value if value in ACTIVATIONS else None
    if type(value) in _FUNCTION:
        return _FUNCTIONS.get(value)
    if type(value) is partial:
        is_tanh_form = value.func is GELU and not value.args and value.keywords == {"approximate": "tanh"}
        return "gelu_tanh" if is_tanh_form else None
    return module_activation(value) if issubclass(type(value), Module) else None


def is_chain(activation: object) -> bool:
    """Return whether a known activation is written as a chain of small ops, where torch has one op."""
    is_python = isinstance(own_values(activation).get("act"), MethodType)
    return is_python or type(activation).__name__ in _CHAINS


_CHAINS = ("NewGELUActivation", "FastGELUActivation", "AccurateGELUActivation")


def drops(value: object) -> bool:
    """Return whether this is a dropout that drops with its present p and mode."""
    return type(value) is Dropout and value.training and value.p != 0


_FUNCTION = (FunctionType, BuiltinFunctionType)


def is_conv1d(layer: object) -> bool:
    """Return whether this is the layer of GPT-2, whose weight is transposed."""
    kind = type(layer)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


_NO_ACTIVATIONS = torch.nn.Softmax | torch.nn.LogSoftmax | torch.nn.Softmax2d | torch.nn.MultiheadAttention
_HOMES = ("torch.nn.modules.activation", "transformers.activations")
_OTHERS: set[Any] = {
    *(functional.elu, functional.selu, functional.celu, functional.glu),
    *(functional.leaky_relu, functional.relu6, functional.mish, functional.hardswish),
}
_NAMES = {it.__name__ for it in (*_FUNCTIONS, *_OTHERS)}


def is_activation(value: object) -> bool:
    """Return whether this is an activation, one of ours or not. "none" isn't one: a site without activation needs no
    op."""
    name = None if type(value) is str else known_activation(value)
    if type(value) in _FUNCTION:
        return name is not None or value in _OTHERS
    is_others = type(value).__module__ in _HOMES and not issubclass(type(value), _NO_ACTIVATIONS)
    return name != "none" and (name is not None or is_others)


def uses_activation(module: object) -> bool:
    """Return whether a module holds an activation, or a method of its class names one."""
    attributes = own_values(module)
    if any(map(is_activation, (*books_of(attributes)[-1].values(), *attributes.values()))):
        return True
    classes = [it for it in type(module).__mro__ if it not in Module.__mro__]
    values = [value for kind in classes for value in vars(kind).values()]
    methods = [value.__func__ if isinstance(value, staticmethod | classmethod) else value for value in values]
    return any(not _NAMES.isdisjoint(names_in(it.__code__)) for it in methods if isinstance(it, FunctionType))


def names_in(code: CodeType) -> list[str]:
    """Return the globals and attributes that a function and its inner functions name."""
    inner = [name for it in code.co_consts if isinstance(it, CodeType) for name in names_in(it)]
    return [*code.co_names, *inner]


def is_layer(value: object) -> bool:
    """Return whether this is a linear layer, or a convolution of size 1, which computes the same."""
    is_convolution = issubclass(type(value), Conv1d | Conv2d | Conv3d)
    return is_linear(value) or (is_convolution and set(getattr(value, "kernel_size", ())) == {1})


def is_linear(value: object) -> bool:
    """Return whether this is a linear layer, or a wrapper that looks like one."""
    if issubclass(type(value), Linear) or is_conv1d(value):
        return True
    if issubclass(type(value), ScriptModule):  # whose attributes aren't in its __dict__
        return getattr(value, "original_name", "") == "Linear"
    attributes = own_values(value)
    weight: Any = attributes.get("weight", books_of(attributes)[0].get("weight"))
    return "in_features" in attributes or (issubclass(type(weight), Tensor) and weight.ndim == 2)


Named = Sequence[tuple[str, Any]]
PLAIN_TENSORS = (Tensor, Parameter)  # no subclasses: for DTensors, quantised and fake weights the plain lines run
_FOREIGN = "holds tensors of another class"
WATCHED = "has hooks, or a forward of its own"
PATCHED = "runs what somebody has put in place of torch's own"


def why_no_layer(layer: Module) -> str | None:
    """Return why this isn't a plain linear layer. None if it is one."""
    if type(layer) is not Linear and not is_conv1d(layer):
        return "is no plain torch.nn.Linear"
    if not runs_forward_alone(layer):
        return WATCHED
    if not is_original(layer):
        return PATCHED
    bias = layer.bias
    if type(layer.weight) not in PLAIN_TENSORS or (bias is not None and type(bias) not in PLAIN_TENSORS):
        return _FOREIGN
    return None


def why_no_activation(activation: object) -> str | None:
    """Return why this isn't one of our activations, unpatched and without hooks. None if it is one."""
    if known_activation(activation) is None:
        return "is no activation that mpkernels knows"
    if isinstance(activation, Module) and not runs_forward_alone(activation):
        return WATCHED
    return None if is_original(activation) else PATCHED


def why_not_passing(value: object) -> str | None:
    """Return why this is neither a plain dropout (a module or torch's function) nor a plain identity. None if it is."""
    if type(value) is not Dropout and type(value) is not Identity:
        return None if value is DROPOUT else "is no plain torch.nn.Dropout or torch.nn.Identity"
    if not runs_forward_alone(value):
        return WATCHED
    return None if is_original(value) else PATCHED


def why_not(layers: Named, activation: Named, between: Named) -> str:
    """Return why no op of ours can replace calls of these named modules and functions. "" if one can."""
    reasons = []
    for name, layer in layers:
        why = why_no_layer(layer)
        # fully_shard replaces DTensors by plain tensors in a forward
        reasons.append((name, None if why is _FOREIGN and is_sharded(layer.weight) else why))
    reasons += [(name, why_no_activation(it)) for name, it in activation]
    reasons += [(name, why_not_passing(it)) for name, it in between]
    dropping = sum(it is DROPOUT or (type(it) is Dropout and it.p != 0) for _, it in between)
    twice = "more than one dropout stands between its layers" if dropping > 1 else ""
    return next((f"{name} {why}" for name, why in reasons if why is not None), twice)
