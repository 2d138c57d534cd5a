"""Checks of what users give to layers and to their functions. Each error names who was called, the argument, what was
wanted, what came, and where it belongs if that is plain."""

from collections.abc import Mapping
from numbers import Real

import torch
from torch import Tensor
from torch.nn import Module

from mpkernels.ops._autocast import has_autocast
from mpkernels.ops.linear.activations import ACTIVATIONS
from mpkernels.ops.linear.block_kind import Kind, Parameters


def tensor(who: str, name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        meant = hint(value)
        raise TypeError(f"{who}: {name} must be a tensor, got {repr(value) if meant else type(value).__name__}{meant}")


def flag(who: str, name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{who}: {name} must be a bool, got {value!r}{hint(value)}")


def layer(who: str, widths: Mapping[str, object], bias: object, device: object, dtype: object) -> None:
    """Check the arguments of any layer. torch checks sizes, devices and dtypes that have the right type."""
    for name, value in widths.items():
        width(who, name, value)
    flag(who, "bias", bias)
    for name, value in (("device", device), ("dtype", dtype)):
        if meant := hint(value):
            raise TypeError(f"{who}: {name} must be a torch.{name}, got {value!r}{meant}")


def width(who: str, name: str, value: object, wanted: str = "an int") -> None:
    if isinstance(value, bool):
        raise TypeError(f"{who}: {name} must be {wanted}, got {value}; did you mean bias={value}?")
    if not hasattr(type(value), "__index__"):
        raise TypeError(f"{who}: {name} must be {wanted}, got {value!r}{hint(value)}")


def probability(who: str, name: str, value: object) -> None:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (float, int, Real)):
        raise TypeError(f"{who}: {name} must be a number, got {value!r}{hint(value)}")
    if not 0 <= float(value) <= 1:
        raise ValueError(f"{who}: {name} must be between 0 and 1, got {value}")


def hint(value: object) -> str:
    """Return a question for a user who gave an activation in another argument's place; an empty string for others."""
    if isinstance(value, str):
        return f"; did you mean activation={value.lower()!r}?" if value.lower() in ACTIVATIONS else ""
    is_module = isinstance(value, Module) or (isinstance(value, type) and issubclass(value, Module))
    return f"; did you mean activation={value!r}?" if is_module else ""


_NAMES = {
    "linear_act": ("weight", "bias", "", "", "", ""),
    "gated_linear": ("gate_weight", "gate_bias", "up_weight", "up_bias", "", ""),
    "mlp": ("fc1_weight", "fc1_bias", "", "", "fc2_weight", "fc2_bias"),
    "gated_mlp": ("gate_weight", "gate_bias", "up_weight", "up_bias", "down_weight", "down_bias"),
}


def block(kind: Kind, x: Tensor, params: Parameters) -> None:
    """Check the tensors that a function is called with."""
    op, names = kind.op, Parameters(*_NAMES[kind.op])
    for name, it in (("x", x), *zip(names, params, strict=True)):
        if it is not None or ("weight" in name and name != "up_weight"):
            tensor(op, name, it)
    if x.dim() == 0:
        raise ValueError(f"{op}: x must have at least one dimension, got a scalar")
    _first_weight(kind, names.weight, x, params.weight)
    rows = params.weight.shape[0] if params.weight.dim() == 2 else 1
    if kind.is_stacked and rows % 2:
        raise ValueError(f"{op}: {names.weight} must have gate's rows and as many of up, got {rows}")
    if kind.is_stacked and params.up_bias is not None:
        raise ValueError(f"{op}: up_bias must be None without up_weight: gate_bias holds both")
    hidden = rows // 2 if kind.is_stacked else rows
    outputs = hidden if params.out_weight is None else params.out_weight.shape[0]
    shapes: Parameters = Parameters(None, (rows,), tuple(params.weight.shape), (rows,), ("any", hidden), (outputs,))
    for name, it, shape in zip(names, params, shapes, strict=True):
        if it is None or shape is None or (op == "linear_act" and it.numel() == 1 and it.dim() < 2):
            continue
        if it.dim() != len(shape) or any(want not in ("any", got) for want, got in zip(shape, it.shape, strict=True)):
            wanted = f"({', '.join(map(str, shape))}{',' * (len(shape) == 1)})"
            raise ValueError(f"{op}: {name} must have shape {wanted}, got {tuple(it.shape)}")
    casts = has_autocast(x.device.type) and torch.is_autocast_enabled(x.device.type)
    device, dtype, as_weight = params.weight.device, params.weight.dtype, f"as {names.weight} is"
    for name, it in (("x", x), *zip(names, params, strict=True)):
        if it is not None and it.device != device:
            raise ValueError(f"{op}: {name} must be on {device}, {as_weight}, got {it.device}")
        if it is not None and it.dtype != dtype and not casts:
            raise TypeError(f"{op}: {name} must be {dtype}, {as_weight}, got {it.dtype}")


def _first_weight(kind: Kind, name: str, x: Tensor, weight: Tensor) -> None:
    shape = tuple(weight.shape)
    if weight.dim() != 2 and (kind.op != "linear_act" or weight.dim() != 1):
        wanted = "one or two dimensions" if kind.op == "linear_act" else "two dimensions"
        raise ValueError(f"{kind.op}: {name} must have {wanted}, got shape {shape}")
    if shape[-1] != x.shape[-1]:
        wanted = f"{name}'s {shape[-1]} features in its last dimension"
        raise ValueError(f"{kind.op}: x must have {wanted}, got shape {tuple(x.shape)}")
