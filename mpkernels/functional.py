"""torch.nn.functional's shapes and rules around the ops."""

from collections.abc import Callable
from functools import partial
from math import prod

import torch
from torch import Tensor
from torch.nn import functional

from mpkernels import _cast_cache
from mpkernels.ops import _checks
from mpkernels.ops import linear_act as _linear_act
from mpkernels.ops._activations import check_activation
from mpkernels.ops._registry import DEVICES

_TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda z: z,
    "relu": functional.relu,
    "relu2": lambda z: functional.relu(z).square(),
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def linear_act(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "gelu") -> Tensor:
    """``activation(F.linear(x, weight, bias))``, computed in fp32, rounded once; one tensor is saved for backward.

    ``activation``: none, relu, relu2 (its square), gelu, gelu_tanh, silu, sigmoid, tanh. Shapes, autocast and gradients
    are those of ``F.linear`` and the activation, to any order, also under torch.compile and torch.func. Weights in fp32
    under autocast get fp32 gradients that were never rounded to 16 bits; so do 16-bit ones with
    ``weight.grad_dtype = torch.float32``.
    """
    check_activation("linear_act", activation)
    _check_shapes(x, weight, bias)
    if _kernel(x, weight) == "torch":
        return _TORCH[activation](functional.linear(x, weight, bias))
    if weight.dim() == 1:
        return linear_act(x, weight.unsqueeze(0), bias, activation).squeeze(-1)
    if bias is not None and bias.shape != weight.shape[:1]:
        bias = bias.expand(weight.shape[0])
    cast = None
    if torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x = _as_autocast_casts(x, dtype)
        if weight.dtype == torch.float32 and (bias is None or bias.dtype == torch.float32) and _cast_cache.is_usable():
            cast = _cast_cache.cast(weight, dtype), None if bias is None else _cast_cache.cast(bias, dtype)
        else:
            weight = _as_autocast_casts(weight, dtype)
            bias = None if bias is None else _as_autocast_casts(bias, dtype)
    rows = x.reshape(prod(x.shape[:-1]), x.shape[-1])
    return _linear_act(rows, weight, bias, activation, cast).reshape(*x.shape[:-1], weight.shape[0])


def _kernel(x: Tensor, weight: Tensor) -> str:
    """Who computes: "ours" or "torch"."""
    return "ours" if x.device.type in DEVICES else "torch"


def _as_autocast_casts(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() and value.dtype != torch.float64 else value


def _check_shapes(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    op = "linear_act"
    _checks.tensor(op, "x", x)
    _checks.tensor(op, "weight", weight)
    if x.dim() == 0:
        raise ValueError(f"{op}: x must have at least one dimension, got a scalar")
    if weight.dim() not in (1, 2):
        raise ValueError(f"{op}: weight must have one or two dimensions, got shape {tuple(weight.shape)}")
    if x.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"{op}: x must have weight's {weight.shape[-1]} features in its last dimension, got shape {tuple(x.shape)}"
        )
    if bias is not None:
        _checks.tensor(op, "bias", bias)
        features = weight.shape[0] if weight.dim() == 2 else 1
        if bias.dim() > 1 or bias.numel() not in (1, features):
            raise ValueError(f"{op}: bias must have shape ({features},), got {tuple(bias.shape)}")
