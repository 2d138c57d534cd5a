"""Chooses what computes a linear_act: the fastest of our kernels and plain torch."""

from collections.abc import Hashable
from functools import partial

import torch
from torch import Tensor, get_autocast_dtype, is_autocast_enabled, is_grad_enabled
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.nn import Parameter

from mpkernels import selector
from mpkernels._torch_private.modes import are_transforms_active, is_any_autocast_enabled, is_deterministic
from mpkernels._torch_private.tracing import constant_in_graphs, is_jit_tracing, is_tracing
from mpkernels.linear.trial import LinearTrial, is_transposed
from mpkernels.ops._autocast import has_autocast
from mpkernels.ops._registry import kernels_on
from mpkernels.ops._stack import DEVICES, forced
from mpkernels.ops.linear.tf32 import uses_tf32
from mpkernels.selector.case import Case

PLAIN = frozenset((Tensor, Parameter))


def key_of(x: Tensor, weight: Tensor, bias: Tensor | None, activation: object) -> Hashable:
    """Return a key for ``selector.by_key`` that holds everything the choice of a kernel depends on. Return None for a
    call that needs a closer look, such as one on tensor subclasses. Bad arguments are left to the kernels to find,
    because every check here slows down small layers.
    """
    # Whoever else compiles brings tensors that are no plain ones. The one asked is a call less than is_compiling.
    if is_dynamo_compiling() or forced or is_jit_tracing():
        return None
    if type(x) is not Tensor or type(weight) not in PLAIN or type(activation) is not str:
        return None
    try:
        of_x = x.shape, x.stride(-1), x.layout, x.dtype, x.device
        of_weight = weight.shape, weight.stride(-1), weight.layout, weight.dtype
    except (RuntimeError, IndexError):  # nested, without dimensions
        return None
    trains, of_bias = weight.requires_grad or x.requires_grad, None
    if bias is not None:
        if type(bias) not in PLAIN:
            return None
        of_bias, trains = (bias.shape, bias.dtype), trains or bias.requires_grad
    key: Hashable = (activation, of_x, of_weight, of_bias, trains and is_grad_enabled())
    if not x.is_cpu:
        key = key, uses_tf32()
    if not (is_any_autocast_enabled() or is_deterministic()):
        return key
    kind = "cpu" if x.is_cpu else "cuda"
    # is_autocast_enabled reads a name, which takes longer than all else here where caches are cold.
    autocast = get_autocast_dtype(kind) if is_any_autocast_enabled() and is_autocast_enabled(kind) else None
    return key, autocast, is_deterministic()


def _trains(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return is_grad_enabled() and (weight.requires_grad or x.requires_grad or (bias is not None and bias.requires_grad))


def kernel_for(
    key: Hashable,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    autocast: torch.dtype | None,
) -> str:
    """Return a kernel of ours or plain torch, whichever is faster; under ``backend`` the dispatcher's choice."""
    if forced:
        return "dispatched"
    within_functorch = are_transforms_active()
    if key is not None and not within_functorch and (chosen := selector.by_key.get(key)) is not None:
        return chosen
    dtypes = autocast or x.dtype, x.dtype, weight.dtype
    leaves = [x, weight] if bias is None else [x, weight, bias]
    trains = _trains(x, weight, bias)
    layouts = "".join(f", {name}.t()" for name, it in (("x", x), ("weight", weight)) if is_transposed(it))
    variant = f"{activation}{'' if bias is None else ' + bias'}{', with grad' if trains else ''}{layouts}"
    variant += in_tf32(x.device, dtypes[0])
    is_odd = torch.float64 in dtypes or weight.dim() != 2
    if not is_compiling():  # where a look at sizes would make conditions of the graph
        is_odd = is_odd or within_functorch or weight.numel() * x.numel() == 0
    if is_odd:
        return "torch"
    device, sizes = x.device, (weight.shape[-1], weight.shape[0])
    if is_tracing():
        return known_kernel("linear_act", device, sizes, dtypes, variant)
    rows = rows_of(x)
    case = Case("linear_act", device, sizes, dtypes, variant, rows)
    prepare = partial(LinearTrial, rows, leaves, activation, trains, autocast)
    return selector.choose(case, names(device), prepare, key)


@constant_in_graphs
def in_tf32(device: torch.device, dtype: torch.dtype) -> str:
    """Return what is added to a case whose products may round their operands."""
    return ", in TF32" if device.type == "cuda" and dtype == torch.float32 and uses_tf32() else ""


def rows_of(x: Tensor) -> int:
    """Return how many rows x has, rounded up to a power of two."""
    return 1 << (x.numel() // x.shape[-1] - 1).bit_length()


@constant_in_graphs
def known_kernel(
    op: str,
    device: torch.device,
    sizes: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    variant: str,
    *also: str,
) -> str:
    """Return the choice for any number of rows: a graph serves several sizes."""
    available = names(device, *also)
    if any(isinstance(size, torch.SymInt) for size in sizes):  # to compare it would make a constant of it
        return selector.unmeasured(device, available)
    return selector.known(Case(op, device, sizes, dtypes, variant, rows=None), available)


def names(device: torch.device, *also: str) -> tuple[str, ...]:
    """Return the kernels that are fit for use there, and ``also`` another way to use them; plain torch comes last."""
    if device.type not in DEVICES:
        return ("torch",)
    unfit = ("reference", "triton") if device.type == "cpu" else ("reference",)  # Triton is interpreted there
    ours = [name for name in kernels_on(device, "linear_act") if name not in unfit]
    return (*ours, *also, "torch") if ours else ("torch",)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    device_type = x.device.type
    if has_autocast(device_type) and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None
