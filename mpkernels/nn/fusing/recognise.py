"""Recognises what a module is: a linear layer, an activation, a dropout."""

from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Conv1d, Conv2d, Conv3d, Dropout, Linear, Module, functional

from mpkernels._torch_private.modules import books_of
from mpkernels.nn.fusing.originals import GELU
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
_OTHERS = {getattr(functional, name) for name in ("elu", "selu", "celu", "leaky_relu", "relu6", "mish", "hardswish")}
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
    methods = [it for kind in classes for it in vars(kind).values() if isinstance(it, FunctionType)]
    return any(not _NAMES.isdisjoint(it.__code__.co_names) for it in methods)


def is_layer(value: object) -> bool:
    """Return whether this is a linear layer, or a convolution of size 1, which computes the same."""
    is_convolution = issubclass(type(value), Conv1d | Conv2d | Conv3d)
    return is_linear(value) or (is_convolution and set(getattr(value, "kernel_size", ())) == {1})


def is_linear(value: object) -> bool:
    """Return whether this is a linear layer, or a wrapper that looks like one."""
    if issubclass(type(value), Linear) or is_conv1d(value):
        return True
    attributes = own_values(value)
    weight: Any = attributes.get("weight", books_of(attributes)[0].get("weight"))
    return "in_features" in attributes or (issubclass(type(weight), Tensor) and weight.ndim == 2)
