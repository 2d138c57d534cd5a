"""A block: one or two linear layers, with an activation, a gate and a dropout between them; and who computes it."""

from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from mpkernels._torch_private.tracing import is_tracing
from mpkernels.linear import cast_cache
from mpkernels.linear.block_function import differentiable
from mpkernels.linear.block_kind import Kind, Parameters, begin
from mpkernels.linear.paths import AFRESH, as_autocast_casts
from mpkernels.ops import linear_act


def compute(kernel: str, kind: Kind, x: Tensor, own: Parameters, dtype: torch.dtype | None) -> Tensor:
    """Compute by the named kernel, or by plain torch. ``dtype`` is autocast's."""
    if kernel == "torch":
        return by_torch(kind, x, own)
    return _by_ours(kernel, kind, x, own, dtype)


def by_torch(kind: Kind, x: Tensor, own: Parameters) -> Tensor:
    if kind.recompute and torch.is_grad_enabled():
        y: Tensor = checkpoint(partial(by_torch_plainly, kind), x, *own, use_reentrant=False)
        return y
    return by_torch_plainly(kind, x, *own)


def by_torch_plainly(
    kind: tuple[Any, ...],
    x: Tensor,
    weight: Any,
    bias: Tensor | None,
    up_weight: Tensor | None,
    up_bias: Tensor | None,
    out_weight: Tensor | None,
    out_bias: Tensor | None,
) -> Tensor:
    """Compute as a user of torch would, and keep what torch keeps."""
    _, activation, is_gated, _, dropout, _ = kind
    z = linear(x, weight, bias)
    if not is_gated:
        h = AFRESH[activation](z)
    else:
        gate, up = z.chunk(2, -1) if up_weight is None else (z, linear(x, up_weight, up_bias))
        h = AFRESH[activation](gate) * up
    if out_weight is None:
        return h
    return linear(functional.dropout(h, dropout) if dropout else h, out_weight, out_bias)


def _by_ours(kernel: str, kind: Kind, x: Tensor, own: Parameters, dtype: torch.dtype | None) -> Tensor:
    sizes = x.shape
    casts = None
    if dtype is not None:
        x = as_autocast_casts(x, dtype)
        if not is_tracing():
            is_fp32 = [it is not None and it.dtype == torch.float32 for it in own]
            casts = tuple(cast_cache.cast(it, dtype) if wide else None for it, wide in zip(own, is_fp32, strict=True))
        own = Parameters(
            *(
                it if it is None or (casts and casts[i] is not None) else as_autocast_casts(it, dtype)
                for i, it in enumerate(own)
            )
        )
    rows = x if len(sizes) == 2 else x.reshape(prod(sizes[:-1]), sizes[-1])
    shape = *sizes[:-1], own.sizes(kind)[2]
    wanted = torch.is_grad_enabled() and any(it is not None and it.requires_grad for it in (x, *own[:4]))
    if wanted:
        return differentiable(kind, rows, own, casts, kernel, shape)
    with torch.no_grad():
        its = own if casts is None else own.replaced(casts)
        h, _ = begin(kind, rows, its, kernel, save=False)
    if own.out_weight is None:
        return h.view(shape)
    if kind.dropout:
        h = functional.dropout(h, kind.dropout)
    cast = None if casts is None or casts[4] is None else (casts[4], casts[5])
    return linear_act(h, own.out_weight, own.out_bias, "none", shape, cast, kernel)
