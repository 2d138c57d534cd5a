"""Chooses what computes a block: the fastest of our kernels and plain torch."""

from collections.abc import Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling, is_dynamo_compiling

from mpkernels import selector
from mpkernels._torch_private.modes import are_transforms_active, is_any_autocast_enabled, is_deterministic
from mpkernels._torch_private.tracing import is_jit_tracing, is_tracing
from mpkernels.linear.block_kind import ROUNDING, Kind, Parameters
from mpkernels.linear.block_trial import BlockTrial
from mpkernels.linear.choice import PLAIN, autocast_dtype, in_tf32, known_kernel, names, rows_of
from mpkernels.linear.trial import is_transposed
from mpkernels.ops._stack import forced
from mpkernels.ops.linear.tf32 import uses_tf32
from mpkernels.selector.case import Case


def key_of(kind: tuple[Any, ...], x: Tensor, parameters: tuple[Tensor | None, ...]) -> Hashable:
    """Return a key for ``selector.by_key`` that holds everything the choice of a kernel depends on. Return None for a
    call that needs a closer look. Bad arguments have keys, too, under which nothing is found."""
    if is_dynamo_compiling() or forced or is_jit_tracing() or type(x) is not Tensor or type(kind[1]) is not str:
        return None
    try:
        key = [kind, x.shape, x.stride(-1), x.dtype, x.device, x.requires_grad, is_grad_enabled()]
        for it in parameters:
            if it is None:
                key.append(None)
            elif type(it) in PLAIN:
                key += it.shape, it.stride(-1), it.dtype, it.requires_grad
            else:
                return None
        if not x.is_cpu:
            key.append(uses_tf32())
    except (RuntimeError, IndexError):  # nested, sparse, without dimensions
        return None
    if is_any_autocast_enabled() or is_deterministic():
        key += autocast_dtype(x), is_deterministic()
    return tuple(key)


def kernel_for(key: Hashable, kind: Kind, x: Tensor, own: Parameters, autocast: torch.dtype | None) -> str:
    """Return a kernel of ours or plain torch, whichever is faster; under ``backend`` the dispatcher's choice."""
    given = [it for it in (x, *own) if it is not None]
    if torch.float64 in (autocast or x.dtype, *(it.dtype for it in given)) or are_transforms_active():
        return "torch"
    if forced:
        return "dispatched"
    if not is_compiling() and 0 in (x.numel(), *own.sizes(kind)):  # where a look would make conditions of the graph
        return "torch"
    trains = torch.is_grad_enabled() and any(it.requires_grad for it in given)
    variant = _variant(kind, x, own, trains) + in_tf32(x.device, autocast or x.dtype)
    dtypes = tuple(dict.fromkeys((autocast or x.dtype, *(it.dtype for it in given))))
    also = (ROUNDING,) if x.is_cpu and trains and torch.float32 in dtypes[1:] else ()
    if is_tracing():
        return known_kernel(kind.op, x.device, own.sizes(kind), dtypes, variant, *also)
    rows = rows_of(x)
    case = Case(kind.op, x.device, own.sizes(kind), dtypes, variant, rows)
    prepare = partial(BlockTrial, rows, kind, x, own, trains, autocast)
    return selector.choose(case, names(x.device, *also), prepare, key)


def _variant(kind: Kind, x: Tensor, own: Parameters, trains: bool) -> str:
    parts = [kind.activation + " stacked" * kind.is_stacked]
    parts += [name for name, it in own._asdict().items() if it is not None and "bias" in name]
    parts += [f"{name}.t()" for name, it in (("x", x), *own._asdict().items()) if it is not None and is_transposed(it)]
    if kind.dropout:
        parts.append("dropout")
    if trains:
        parts.append("with grad, recomputing" if kind.recompute else "with grad")
        parts += [f"{name} frozen" for name, it in own._asdict().items() if it is not None and not it.requires_grad]
    return ", ".join(parts)
