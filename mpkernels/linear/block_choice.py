"""Chooses what computes a block: the fastest of our kernels and plain torch."""

from collections.abc import Hashable
from functools import partial

import torch
from torch import Tensor
from torch.compiler import is_compiling

from mpkernels import selector
from mpkernels._torch_private import are_transforms_active, is_deterministic, is_tracing
from mpkernels.linear.block_function import Kind, Parameters
from mpkernels.linear.block_trial import BlockTrial
from mpkernels.linear.choice import known_kernel, names, rows_of
from mpkernels.linear.trial import is_transposed
from mpkernels.ops._registry import forced
from mpkernels.selector.case import Case


def kernel_for(kind: Kind, x: Tensor, own: Parameters, autocast: torch.dtype | None) -> str:
    """Return a kernel of ours or plain torch, whichever is faster; under ``backend`` the dispatcher's choice."""
    given = [it for it in (x, *own) if it is not None]
    if torch.float64 in (autocast or x.dtype, *(it.dtype for it in given)) or are_transforms_active():
        return "torch"
    if forced:
        return "dispatched"
    if not is_compiling() and 0 in (x.numel(), *own.sizes(kind)):  # where a look would make conditions of the graph
        return "torch"
    trains = torch.is_grad_enabled() and any(it.requires_grad for it in given)
    variant = _variant(kind, x, own, trains)
    dtypes = tuple(dict.fromkeys((autocast or x.dtype, *(it.dtype for it in given))))
    if is_tracing():
        return known_kernel(kind.op, x.device, own.sizes(kind), dtypes, variant)
    key = _key_of(kind, x, own, trains, autocast)
    if (chosen := selector.by_key.get(key)) is not None:
        return chosen
    rows = rows_of(x)
    case = Case(kind.op, x.device, own.sizes(kind), dtypes, variant, rows)
    prepare = partial(BlockTrial, rows, kind, x, own, trains, autocast)
    return selector.choose(case, names(x.device.type), prepare, key)


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


def _key_of(kind: Kind, x: Tensor, own: Parameters, trains: bool, autocast: torch.dtype | None) -> Hashable:
    """Return everything that the choice depends on."""
    of_each = [None if it is None else (it.shape, it.stride(-1), it.dtype, it.requires_grad) for it in (x, *own)]
    return kind, x.device, trains, autocast, is_deterministic(), *of_each
