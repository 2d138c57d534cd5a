"""torch.nn.functional's shapes and rules around the ops."""

from collections.abc import Callable
from functools import cache, partial
from math import prod

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.nn import functional
from torch.overrides import is_tensor_like

from mpkernels import _cast_cache, selector
from mpkernels._cast_cache import clear as clear_cast_cache
from mpkernels.ops import _checks
from mpkernels.ops import linear_act as _linear_act
from mpkernels.ops._activations import check_activation
from mpkernels.ops._registry import DEVICES, backends, is_forced

__all__ = ["clear_cast_cache", "linear_act"]

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
    ``weight.grad_dtype = torch.float32``. Where plain torch is faster it computes instead, and rounds as it does:
    ``mpkernels.selector`` tells, and can be told otherwise.
    """
    check_activation("linear_act", activation)
    if not _is_ours(x, weight, bias) and all(map(is_tensor_like, (x, weight, *(() if bias is None else (bias,))))):
        return _compute("torch", x, weight, bias, activation)
    _check_shapes(x, weight, bias)
    dtype = _autocast_dtype(x)
    return _compute(_kernel(x, weight, bias, activation, dtype), x, weight, bias, activation, dtype)


_SERVED = frozenset((Tensor, torch.nn.Parameter, FakeTensor))


def _is_ours(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a kernel of ours could serve: dense matrices of torch's own kinds, no derivatives forward, and nobody who
    writes down what torch calls, to call it where we are not."""
    return (
        type(x) in _SERVED
        and type(weight) in _SERVED
        and (bias is None or type(bias) in _SERVED)
        and x.layout is weight.layout is torch.strided
        and not (x.is_nested or x.is_complex() or torch._C._get_tracing_state() is not None)
        and forward_ad._current_level < 0
        and not torch.compiler.is_exporting()
    )


def _compute(
    kernel: str, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, dtype: torch.dtype | None = None
) -> Tensor:
    """``dtype`` is autocast's, which torch takes from where it is."""
    if kernel == "torch":
        return _TORCH[activation](functional.linear(x, weight, bias))
    if weight.dim() == 1:
        return _compute(kernel, x, weight.unsqueeze(0), bias, activation, dtype).squeeze(-1)
    if bias is not None and bias.shape != weight.shape[:1]:
        bias = bias.expand(weight.shape[0])
    cast = None
    if dtype is not None:
        x = _as_autocast_casts(x, dtype)
        if weight.dtype == torch.float32 and (bias is None or bias.dtype == torch.float32) and _cast_cache.is_usable():
            cast = _cast_cache.cast(weight, dtype), None if bias is None else _cast_cache.cast(bias, dtype)
        else:
            weight = _as_autocast_casts(weight, dtype)
            bias = None if bias is None else _as_autocast_casts(bias, dtype)
    rows = x.reshape(prod(x.shape[:-1]), x.shape[-1])
    return _linear_act(rows, weight, bias, activation, cast, kernel).reshape(*x.shape[:-1], weight.shape[0])


def _kernel(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, autocast: torch.dtype | None) -> str:
    """Who computes: a kernel of ours or plain torch, whichever is faster; the dispatcher's choice under ``backend``."""
    if is_forced():
        return "dispatched"
    dtypes = autocast or x.dtype, x.dtype, weight.dtype
    leaves = [x, weight] if bias is None else [x, weight, bias]
    trains = torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    variant = f"{activation}{'' if bias is None else ' + bias'}{', with grad' if trains else ''}"
    if torch.compiler.is_compiling():
        return str(_known_kernel(weight, dtypes, variant))
    is_odd = dtypes[0] == torch.float64 or weight.dim() != 2 or weight.numel() * x.numel() == 0
    if is_odd or torch._C._are_functorch_transforms_active():
        return "torch"
    device = x.device
    outputs, features = weight.shape
    rows = 1 << (x.numel() // features - 1).bit_length()
    case = selector.Case("linear_act", device, (features, outputs), dtypes, variant, rows)
    return selector.choose(case, _names(device.type), partial(_trial, rows, leaves, activation, trains))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _known_kernel(weight: Tensor, dtypes: tuple[torch.dtype, ...], variant: str) -> str:
    """For however many rows: a graph serves several sizes."""
    sizes = weight.shape[-1], weight.shape[0]
    case = selector.Case("linear_act", weight.device, sizes, dtypes, variant, rows=None)
    return selector.known(case, _names(weight.device.type))


@cache
def _names(device_type: str) -> tuple[str, ...]:
    """Fit for use there; plain torch comes last."""
    if device_type not in DEVICES:
        return ("torch",)
    unfit = ("reference", "triton") if device_type == "cpu" else ("reference",)  # Triton is interpreted there
    return *(name for name in backends("linear_act", device_type) if name not in unfit), "torch"


_FLOPS_OF_A_TRIAL = 2**30  # on a CPU, where more rows take proportionally longer


def _trial(rows: int, leaves: list[Tensor], activation: str, trains: bool, kernel: str) -> Callable[[], object]:
    """For the selector: a call like the one at hand, and its backward, on other data."""
    device, (out_features, in_features) = leaves[0].device, leaves[1].shape
    if device.type == "cpu":
        rows = min(rows, max(64, _FLOPS_OF_A_TRIAL // (2 * out_features * in_features)))
    generator = torch.Generator(device).manual_seed(0)
    shapes = (rows, in_features), (out_features, in_features), (out_features,)
    copies = [
        torch.randn(shape, generator=generator, device=device).to(leaf.dtype).requires_grad_(trains)
        for shape, leaf in zip(shapes, leaves, strict=False)
    ]
    x, weight, *bias = copies
    dtype = _autocast_dtype(x)

    def run() -> None:
        # A cast for each call, as there is one for each step; and no saved tensor for a checkpoint to count.
        autocast = torch.autocast(device.type, dtype, enabled=dtype is not None, cache_enabled=False)
        with autocast, torch.autograd.graph.saved_tensors_hooks(_same, _same):
            y = _compute(kernel, x, weight, bias[0] if bias else None, activation, dtype)
        if trains:
            torch.autograd.grad(y, copies, y.detach())

    return run


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    device_type = x.device.type
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


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
