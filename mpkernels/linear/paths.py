"""The ways to compute a linear_act: by plain torch, or by a kernel of ours."""

from collections.abc import Callable
from functools import partial
from math import prod

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling
from torch.nn import functional

from mpkernels._torch_private.modes import are_transforms_active
from mpkernels._torch_private.tracing import is_tracing
from mpkernels.linear import cast_cache
from mpkernels.ops import linear_act as _linear_act

AFRESH: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda z: z,
    "relu": torch.relu,
    "relu2": lambda z: (y := torch.relu(z)) * y,  # CUDA's autocast makes fp32 of square(), which is pow
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
_IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda z: z,
    "relu": torch.relu_,
    "relu2": lambda z: z.relu_().square_(),
    "gelu": torch.ops.aten.gelu_.default,
    "gelu_tanh": partial(torch.ops.aten.gelu_.default, approximate="tanh"),
    "silu": partial(functional.silu, inplace=True),
    "sigmoid": torch.sigmoid_,
    "tanh": torch.tanh_,
}


def compute(
    kernel: str, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, dtype: torch.dtype | None
) -> Tensor:
    """Compute by the named kernel. ``dtype`` is autocast's."""
    if kernel == "torch":
        return (by_torch_afresh if is_compiling() else by_torch)(x, weight, bias, activation)
    return by_ours(kernel, x, weight, bias, activation, dtype)


def by_torch_afresh(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Compute with plain torch, and overwrite nothing."""
    return AFRESH[activation](functional.linear(x, weight, bias))


def by_torch(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Compute with plain torch. Without autograd, nobody needs z any more, and the activation overwrites it."""
    z = functional.linear(x, weight, bias)
    if is_grad_enabled() or are_transforms_active():  # where in place has no batching rules
        return AFRESH[activation](z)
    if activation == "none":
        return z
    return _IN_PLACE[activation](z)


def by_ours(
    kernel: str, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, dtype: torch.dtype | None
) -> Tensor:
    """Compute by a kernel of ours. ``dtype`` is autocast's."""
    sizes = x.shape
    shape = *sizes[:-1], *weight.shape[:-1]
    if len(shape) != len(sizes):
        weight = weight.unsqueeze(0)
    if bias is not None and bias.shape != weight.shape[:1]:
        bias = bias.expand(weight.shape[0])
    cast = None
    if dtype is not None:
        x = as_autocast_casts(x, dtype)
        if weight.dtype == torch.float32 and (bias is None or bias.dtype == torch.float32) and not is_tracing():
            cast = cast_cache.cast(weight, dtype), None if bias is None else cast_cache.cast(bias, dtype)
        else:
            weight = as_autocast_casts(weight, dtype)
            bias = None if bias is None else as_autocast_casts(bias, dtype)
    rows = x if len(sizes) == 2 else x.reshape(prod(sizes[:-1]), sizes[-1])
    return _linear_act(rows, weight, bias, activation, shape, cast, kernel)


def as_autocast_casts(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() and value.dtype != torch.float64 else value
