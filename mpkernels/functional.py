"""Linear layers with an activation, gated layers and MLPs as functions, with the shapes, autocast and gradients of
torch.nn.functional."""

from collections.abc import Hashable
from typing import Any

from torch import Tensor
from torch.overrides import is_tensor_like

from mpkernels import selector
from mpkernels._torch_private.modes import is_any_autocast_enabled
from mpkernels.linear import arguments, paths
from mpkernels.linear.blocks import gated_linear, gated_mlp, mlp
from mpkernels.linear.cast_cache import clear as clear_cast_cache
from mpkernels.linear.choice import autocast_dtype, kernel_for, key_of
from mpkernels.linear.served import is_ours, is_watched
from mpkernels.ops.linear.activations import ActivationLike, activation_name
from mpkernels.parts import columns_of, is_sharded, parts_of_columns

__all__ = ["clear_cast_cache", "gated_linear", "gated_mlp", "linear_act", "mlp"]


def linear_act(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: ActivationLike = "gelu") -> Tensor:
    """Return ``activation(F.linear(x, weight, bias))``, computed in fp32 and rounded once.

    Shapes, autocast, gradients of any order, torch.compile and torch.func work as with ``F.linear`` followed by the
    activation. For the backward, one tensor of y's size is saved, as by torch. Under autocast, fp32 weights get fp32
    gradients that were never rounded to 16 bits. 16-bit weights get such gradients with ``weight.grad_dtype =
    torch.float32``.

    If plain torch is faster for a call, torch computes it and rounds in its own way. ``mpkernels.selector`` shows these
    choices and lets you change them.

    Args:
        x: the input, of any number of dimensions; its last one is in_features long.
        weight: of shape (out_features, in_features).
        bias: of shape (out_features,), or None.
        activation: none, relu, relu2 (the square of relu), gelu, gelu_tanh, silu, sigmoid or tanh. Or a module of torch
            or transformers that computes one of these, such as ``torch.nn.GELU()``.
    """
    key = key_of(x, weight, bias, activation)
    kernel = selector.by_key.get(key)
    name: Any = activation  # where a call is known; one with a module never is
    if kernel == "torch":
        return paths.by_torch(x, weight, bias, name)
    if kernel is None or is_watched():
        return _of_any_kind(key, x, weight, bias, activation)
    dtype = autocast_dtype(x) if is_any_autocast_enabled() else None
    return paths.by_ours(kernel, x, weight, bias, name, dtype)


def _of_any_kind(key: Hashable, x: Tensor, weight: Tensor, bias: Tensor | None, given: ActivationLike) -> Tensor:
    activation = activation_name("linear_act", given)
    tensors = (x, weight) if bias is None else (x, weight, bias)
    if is_sharded(weight) and (parts := parts_of_columns(x, weight, bias)) is not None:
        y: Tensor = columns_of(x, weight, linear_act(*parts, activation))
        return y
    if not (is_ours(x, weight, bias) and (bias is None or bias.dim() < 2)) and all(map(is_tensor_like, tensors)):
        try:
            return paths.by_torch_afresh(x, weight, bias, activation)
        except RuntimeError:
            if type(x) is Tensor and not x.is_nested:
                _check_shapes_and_dtypes(x, weight, bias)
            raise
    _check_shapes_and_dtypes(x, weight, bias)
    dtype = autocast_dtype(x)
    kernel = kernel_for(key, x, weight, bias, activation, dtype)
    return paths.compute(kernel, x, weight, bias, activation, dtype)


def _check_shapes_and_dtypes(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    op = "linear_act"
    arguments.tensor(op, "x", x)
    arguments.tensor(op, "weight", weight)
    if x.dim() == 0:
        raise ValueError(f"{op}: x must have at least one dimension, got a scalar")
    if weight.dim() not in (1, 2):
        raise ValueError(f"{op}: weight must have one or two dimensions, got shape {tuple(weight.shape)}")
    if x.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"{op}: x must have weight's {weight.shape[-1]} features in its last dimension, got shape {tuple(x.shape)}"
        )
    if bias is not None:
        arguments.tensor(op, "bias", bias)
        features = weight.shape[0] if weight.dim() == 2 else 1
        if bias.dim() > 1 or bias.numel() not in (1, features):
            raise ValueError(f"{op}: bias must have shape ({features},), got {tuple(bias.shape)}")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != x.dtype and autocast_dtype(x) is None:
            raise TypeError(f"{op}: {name} must be {x.dtype}, got {tensor.dtype}")
