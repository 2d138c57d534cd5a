"""Makes the key and the case of a call, by which the selector chooses between torch and a kernel of ours."""

from collections.abc import Hashable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, get_autocast_dtype, is_autocast_enabled, is_grad_enabled
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.nn import Parameter

from mpkernels import selector
from mpkernels._torch_private.modes import are_transforms_active, derives_forward, is_any_autocast_enabled
from mpkernels._torch_private.tracing import FakeTensor, constant_in_graphs, is_exporting, is_jit_tracing, is_tracing
from mpkernels.linear.trial import Trial, is_transposed
from mpkernels.ops._autocast import has_autocast
from mpkernels.ops._dispatcher import forced
from mpkernels.ops._registry import kernels_on
from mpkernels.ops.linear.block_kind import ROUNDING, Kind, Parameters, grad_dtype
from mpkernels.ops.linear.tf32 import uses_tf32
from mpkernels.selector.case import Case

_PLAIN = frozenset((Tensor, Parameter))
_SERVED = frozenset((Tensor, Parameter, FakeTensor))


def is_ordinary(kind: Kind, x: Tensor, weight: Tensor) -> bool:
    """Return whether a call may have a key: nothing traces it, and no kernel is forced."""
    # Dynamo comes first, or its graphs would depend on the rest. Other compilers pass subclasses.
    return not (
        is_dynamo_compiling()
        or forced
        or is_jit_tracing()
        or type(x) is not Tensor
        or type(weight) not in _PLAIN
        or type(kind.activation) is not str
    )


def key_of(kind: Kind, x: Tensor, weight: Tensor, bias: Tensor | None, others: tuple[Tensor | None, ...]) -> Hashable:
    """Return a key of an ordinary call for ``selector.by_key``, which holds everything that its computation depends on.
    Return None for a call that needs a closer look. Bad arguments have keys, too, under which nothing is found, because
    every check here slows down small layers."""
    try:
        x_facts = x.shape, x.stride(), x.layout, x.dtype, x.is_cpu or (x.device, uses_tf32()), x.requires_grad
        key: tuple[Any, ...] = kind, x_facts, _facts(weight), is_grad_enabled(), bias if bias is None else _facts(bias)
        for other in others:
            key = *key, other if other is None else _facts(other)
    except (RuntimeError, TypeError):  # x is nested or sparse; a parameter isn't plain
        return None
    return (*key, _autocast(x)) if is_any_autocast_enabled() else key


def key_in_any_size(kind: Kind, x: Tensor, params: Iterable[Tensor | None]) -> Hashable:
    """Return a key of an ordinary call for ``selector.left_to_torch``: what the table's lines depend on, but for the
    number of rows, and what was checked. In a small layer, ``key_of`` takes as long as the activation."""
    try:
        checked = tuple([None if it is None else (it.shape, it.device) for it in params])
    except AttributeError:  # no tensors
        return None
    return kind, x.dtype, x.device, checked, _autocast(x) if is_any_autocast_enabled() else None


def _autocast(x: Tensor) -> torch.dtype | None:
    device_type = "cpu" if x.is_cpu else "cuda"
    return get_autocast_dtype(device_type) if is_autocast_enabled(device_type) else None


def _facts(parameter: Tensor) -> tuple[Any, ...]:
    """Return what a call depends on, gradients included. Raise for a parameter that needs a closer look."""
    if type(parameter) not in _PLAIN:
        raise TypeError
    dtype = parameter.dtype
    of_gradient = None if dtype is torch.float32 else grad_dtype(parameter)
    place = parameter.is_cpu or parameter.device
    return parameter.shape, parameter.stride(), parameter.layout, place, dtype, parameter.requires_grad, of_gradient


def is_ours(x: Tensor, *parameters: Tensor | None) -> bool:
    """Return whether one of our kernels can compute this call. Kernels need dense, plain tensors and no forward-mode
    derivatives. Nor may torch.export or torch.jit.trace record the call, because the record must run without us."""
    return (
        type(x) in _SERVED
        and all(it is None or (type(it) in _SERVED and it.layout is torch.strided) for it in parameters)
        and x.layout is torch.strided
        and x.is_floating_point()
        and not (x.is_nested or derives_forward() or is_exporting())
        and (is_compiling() or not is_jit_tracing())
    )


def kernel_for(kind: Kind, x: Tensor, params: Parameters, autocast: torch.dtype | None, has_key: bool) -> str:
    """Return the name of a kernel of ours, or "torch"; under ``backend``, "dispatched". ``has_key`` says whether the
    call has a key."""
    given = [it for it in (x, *params) if it is not None]
    if torch.float64 in (autocast or x.dtype, *(it.dtype for it in given)) or are_transforms_active():
        return "torch"
    if forced:
        return "dispatched"
    if not is_compiling() and 0 in (x.numel(), *params.sizes(kind)):  # a look would add guards
        return "torch"
    trains = is_grad_enabled() and any(it.requires_grad for it in given)
    dtypes = tuple(dict.fromkeys((autocast or x.dtype, *(it.dtype for it in given))))
    rounds = trains and dtypes[0].itemsize == 2 and any(it is not None and it.dtype == torch.float32 for it in params)
    details = _details(kind, x, params, trains)
    case_facts = kind.op, x.device, params.sizes(kind), dtypes, kind.activation, trains, details, rounds
    if is_tracing():
        return _known(*case_facts)
    rows = x.numel() // x.shape[-1]
    case = _case(*case_facts)._replace(rows=1 << (rows - 1).bit_length())
    if has_key and not kind.recompute:
        selector.leave_to_torch(case, key_in_any_size(kind, x, params[kind.given]))
    return selector.choose(case, partial(Trial, rows, kind, x, params, trains, autocast))


@constant_in_graphs
def _known(*case_facts: Any) -> str:
    """Return the choice for any number of rows: a graph serves several sizes."""
    case = _case(*case_facts)
    if any(isinstance(size, torch.SymInt) for size in case.sizes):  # a comparison would make it constant
        case = case._replace(sizes=())
    return selector.choose(case)


def _case(
    op: str, device: torch.device, sizes: tuple[int, ...], dtypes: tuple[torch.dtype, ...], activation: str,
    trains: bool, details: str, rounds: bool,
) -> Case:  # fmt: skip
    """Return the case for any number of rows. ``rounds`` says whether autocast casts a parameter that trains."""
    if device.type == "cuda" and dtypes[0] == torch.float32 and uses_tf32():
        details += ", in TF32"
    unfit = ("reference", "triton") if device.type == "cpu" else ("reference",)  # Triton is interpreted there
    ours = [name for name in kernels_on(device, "linear_act") if name not in unfit]
    if "native" in ours and device.type == "cpu" and rounds and op != "linear_act":
        ours.append(ROUNDING)
    return Case(op, device, sizes, dtypes, activation, trains, details, None, (*ours, "torch"))


def _details(kind: Kind, x: Tensor, params: Parameters, trains: bool) -> str:
    """Return what else the time of a call depends on."""
    named = params._asdict().items()
    parts = ["stacked"] if kind.is_stacked else []
    parts += [name for name, it in named if it is not None and "bias" in name]
    parts += [f"{name}.t()" for name, it in (("x", x), *named) if it is not None and is_transposed(it)]
    parts += ["dropout"] if kind.dropout else []
    parts += ["recomputing"] if trains and kind.recompute else []
    parts += [f"{name} frozen" for name, it in (("x", x), *named) if trains and it is not None and not it.requires_grad]
    return "".join(f", {part}" for part in parts)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    device_type = x.device.type
    if has_autocast(device_type) and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None
