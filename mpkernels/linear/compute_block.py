"""Computes a block by plain torch, or by our kernels with the casts that autocast would make."""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling
from torch.nn import functional
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from mpkernels._torch_private.modes import are_transforms_active, is_watched
from mpkernels._torch_private.tracing import is_tracing
from mpkernels.linear import cast_cache
from mpkernels.ops.linear import autograd_block, trained_block
from mpkernels.ops.linear.activations import AFRESH, IN_PLACE
from mpkernels.ops.linear.block_kind import Kind, Parameters


def prepared(
    kernel: str, kind: Kind, x: Tensor, params: Parameters, dtype: torch.dtype | None
) -> Callable[..., Tensor | None]:
    """Return a function of x and the parameters, which computes all calls that have the key of this one. If a call is
    watched, a kernel of ours may not compute it, and the function returns None."""
    if kernel == "torch":
        return (lambda x, *params: afresh(kind, x, Parameters(*params))) if kind.recompute else partial(by_torch, kind)
    call = trained_block.call_for(kind, kernel, x, params, dtype or x.dtype)
    if call is None:
        return lambda x, *params: None if is_watched() else by_ours(kernel, kind, x, Parameters(*params), dtype)
    if dtype is None:
        return lambda x, *params: None if is_watched() else trained_block.compute(x, *params, None, call)

    def under_autocast(x: Tensor, *params: Tensor | None) -> Tensor | None:
        if is_watched():
            return None
        casts = [it if it is None or it.dtype is dtype else cast_cache.cast(it, dtype) for it in params]
        return trained_block.compute(x if x.dtype is dtype else x.to(dtype), *params, casts, call)

    return under_autocast


def compute(kernel: str, kind: Kind, x: Tensor, params: Parameters, dtype: torch.dtype | None) -> Tensor:
    """Compute by the named kernel, or by plain torch. ``dtype`` is autocast's."""
    if kernel != "torch":
        return by_ours(kernel, kind, x, params, dtype)
    return afresh(kind, x, params) if is_compiling() or kind.recompute else by_torch(kind, x, *params)


def afresh(kind: Kind, x: Tensor, params: Parameters) -> Tensor:
    """Compute with plain torch, and overwrite nothing. torch.func's transforms take no checkpoint."""
    if kind.recompute and is_grad_enabled() and not are_transforms_active():
        y: Tensor = checkpoint(partial(by_torch, kind), x, *params, use_reentrant=False)
        return y
    return by_torch(kind, x, *params, overwrites=False)


def by_torch(
    kind: Kind,
    x: Tensor,
    weight: Any,
    bias: Tensor | None,
    up_weight: Tensor | None = None,
    up_bias: Tensor | None = None,
    out_weight: Tensor | None = None,
    out_bias: Tensor | None = None,
    *,
    overwrites: bool = True,
) -> Tensor:
    """Compute as a user of torch would, and keep what torch keeps. Without autograd, nobody needs z any more, so the
    activation overwrites z by its in-place function."""
    _, activation, is_gated, _, dropout, _ = kind
    z = linear(x, weight, bias)
    is_afresh = is_grad_enabled() or not overwrites or are_transforms_active()
    activate = (AFRESH if is_afresh else IN_PLACE)[activation]
    if not is_gated:
        h = activate(z)
    else:
        gate, up = z.chunk(2, -1) if up_weight is None else (z, linear(x, up_weight, up_bias))
        h = activate(gate) * up
    if out_weight is None:
        return h
    return linear(functional.dropout(h, dropout) if dropout else h, out_weight, out_bias)


def by_ours(kernel: str, kind: Kind, x: Tensor, params: Parameters, dtype: torch.dtype | None) -> Tensor:
    """Compute by a kernel of ours. ``dtype`` is autocast's."""
    sizes, casts = x.shape, None
    if dtype is not None:
        x = _as_autocast_casts(x, dtype)
        keeps = not is_tracing()
        is_kept = [keeps and it is not None and it.dtype == torch.float32 for it in params]
        if True in is_kept:
            casts = tuple(
                [cast_cache.cast(it, dtype) if kept else None for it, kept in zip(params, is_kept, strict=True)]
            )
        params = Parameters(
            *[
                it if it is None or kept else _as_autocast_casts(it, dtype)
                for it, kept in zip(params, is_kept, strict=True)
            ]
        )
    outputs = params.sizes(kind)[2]
    if len(sizes) == 2:
        return autograd_block.compute(kind, x, params, casts, kernel, (sizes[0], outputs))
    rows = x.reshape(prod(sizes[:-1]), sizes[-1])
    return autograd_block.compute(kind, rows, params, casts, kernel, (*sizes[:-1], outputs))


def _as_autocast_casts(value: Tensor, dtype: torch.dtype) -> Tensor:
    if value.dtype == dtype or not value.is_floating_point():  # most values, which need no op
        return value
    return value.to(dtype)
