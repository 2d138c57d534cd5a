"""A block as one differentiable function.

Its backward keeps z, which the activation was taken of, and computes h, the input of the last layer, anew. (After an
activation whose result tells its slope, an ungated block keeps h instead.) With ``recompute`` it keeps x alone. Of a
dropout it keeps the mask, as bools.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mpkernels._torch_private.ops import unsafe_view
from mpkernels._torch_private.tensors import version_of
from mpkernels.linear.block_kind import ROUNDING, Kind, Parameters, begin
from mpkernels.ops._autocast import without_autocast
from mpkernels.ops.linear.activations import ACTIVATIONS
from mpkernels.ops.linear.linear_act import _linear_act, _linear_act_backward, grad_dtype, unchanged
from mpkernels.ops.linear.linear_dact import _linear_dact
from mpkernels.ops.linear.linear_gated import _linear_dgated, gradients


def differentiable(
    kind: Kind,
    x: Tensor,
    own: Parameters,
    casts: tuple[Tensor | None, ...] | None,
    kernel: str,
    shape: tuple[int, ...],
) -> Tensor:
    """Return the block's result of matrix x, in the ``shape`` that is wanted. ``casts``: for each parameter its value
    in x's dtype, where its own is fp32."""
    y: Tensor = _Block.apply(x, *own, casts, kind, kernel, shape)[0]  # type: ignore[no-untyped-call]
    return y


class _Block(torch.autograd.Function):
    """Its further results are what the backward keeps: z or h, through which a second backward finds its way to x and
    the weights, and the dropout's mask. The gradients of fp32 parameters are never rounded to 16 bits, but with
    ROUNDING."""

    @staticmethod
    def forward(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        *parameters, casts, kind, kernel, shape = arguments
        its = Parameters(*parameters).replaced(casts)
        h, z = begin(kind, x, its, kernel, save=not kind.recompute)
        kept = x.new_empty(0) if kind.recompute else z if kind.keeps_z else h
        y, mask = h, x.new_empty(0, dtype=torch.bool)
        if its.out_weight is not None:
            if kind.dropout:
                h, mask = torch.native_dropout(h, kind.dropout, True)
            y, _ = _linear_act.by(kernel)(h, its.out_weight, its.out_bias, "none", False)
        # No view, which autograd would not let be changed in place.
        return y if y.shape == shape else unsafe_view(y, shape), kept, mask

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        x, *parameters, casts, ctx.kind, ctx.kernel, _ = inputs
        own = Parameters(*parameters)
        its = own.replaced(casts)
        ctx.mark_non_differentiable(output[2])
        ctx.matrix = x.shape[0], its.sizes(ctx.kind)[2]
        _save(ctx, x, own, its, *output[1:])

    @staticmethod
    def backward(
        ctx: Any, dy: Tensor | None, grad_of_kept: Tensor | None, _: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        is_compiling = torch.compiler.is_compiling()
        if is_compiling or ctx.kind.recompute:
            grad_of_kept = None  # zeros of torch.compile's, which knows no second backward
        if dy is None and grad_of_kept is None:
            return (None,) * 11
        x, *parameters, kept, mask = ctx.saved_tensors
        its, mask = Parameters(*parameters), mask if ctx.kind.dropout else None
        dy = kept.new_zeros(ctx.matrix) if dy is None else dy.reshape(ctx.matrix)
        if grad_of_kept is None and (is_compiling or not torch.is_grad_enabled()):
            dz, dbias, *of_out = _backward_of_out(ctx, dy, x, its, kept, mask)
            return *_backward_of_first(ctx, dz, dbias, x, its), *of_out, *(None,) * 4
        with without_autocast(dy):
            return *_backward_by_torch(ctx, dy, x, its, kept, mask, grad_of_kept), *(None,) * 4


def _save(ctx: Any, x: Tensor, own: Parameters, its: Parameters, kept: Tensor, mask: Tensor) -> None:
    """Save what the gradients that are wanted need."""
    ctx.set_materialize_grads(False)
    wants_x, *wants = ctx.needs_input_grad[:7]

    def dtype_of_gradient(of: Tensor) -> torch.dtype:
        return x.dtype if ctx.kernel == ROUNDING and of.dim() == 2 else grad_dtype(of)

    ctx.dtypes = Parameters(*(dtype_of_gradient(it) if want else None for it, want in zip(own, wants, strict=True)))
    # For a second backward. fp32 ones aren't saved: they may be stepped before the backward, which needs their casts.
    ctx.fp32 = [
        None if mine is cast or mine.is_inference() else (mine, version_of(mine))
        for mine, cast in zip(own, its, strict=True)
    ]
    again = ctx.kind.recompute
    needed = Parameters(wants_x or again, again, wants_x or again, again, True, False)
    ctx.save_for_backward(
        x if again or ctx.dtypes.weight or ctx.dtypes.up_weight else None,
        *(it if need else None for it, need in zip(its, needed, strict=True)),
        kept,
        mask,
    )


_Gradients = tuple[Tensor | None, ...]


def _backward_of_out(
    ctx: Any, dy: Tensor, x: Tensor, its: Parameters, kept: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of z, of its bias if a kernel sums it up on the way, and of the last layer's parameters."""
    kind, dtypes, nothing = ctx.kind, ctx.dtypes, dy.new_empty(0)
    if kind.recompute:
        h, z = begin(kind, x, its, ctx.kernel, save=True)
        kept = z if kind.keeps_z else h
    wants_h, dbias = dtypes.out_weight is not None, None
    if kind.is_gated:
        dz, h = _linear_dgated.by(ctx.kernel)(dy, its.out_weight, kept, kind.activation, wants_h)
    else:
        saved = kept if ACTIVATIONS[kind.activation].saves else nothing
        bias_dtype = dtypes.bias if mask is None else None
        dz, dbias, anew = _linear_dact.by(ctx.kernel)(dy, its.out_weight, saved, kind.activation, bias_dtype, wants_h)
        dbias = None if bias_dtype is None else dbias
        h = anew if kind.keeps_z else kept
    if mask is not None:
        h = _dropped(h, mask, kind) if wants_h else h
        dz = _dropped(dz.view(len(mask), -1, mask.shape[1]), mask.unsqueeze(1), kind).view(dz.shape)
    if not wants_h and dtypes.out_bias is None:
        return dz, dbias, None, None
    backward = _linear_act_backward.by(ctx.kernel)
    _, dweight, dout_bias = backward(
        dy, h if wants_h else None, None, nothing, "none", dtypes.out_weight, dtypes.out_bias
    )
    return dz, dbias, dweight if wants_h else None, None if dtypes.out_bias is None else dout_bias


def _dropped(value: Tensor, mask: Tensor, kind: Kind) -> Tensor:
    return value * mask * (0.0 if kind.dropout == 1 else 1 / (1 - kind.dropout))


def _backward_of_first(ctx: Any, dz: Tensor, dbias: Tensor | None, x: Tensor | None, its: Parameters) -> _Gradients:
    """Return the gradients of x and of the first layer's parameters."""
    dtypes, wants_x = ctx.dtypes, ctx.needs_input_grad[0]

    def backward(dz: Tensor, weight: Tensor | None, *dtypes: torch.dtype | None) -> list[Tensor | None]:
        if not wants_x and dtypes == (None, None):
            return [None] * 3
        wants = wants_x, *(dtype is not None for dtype in dtypes)
        results = _linear_act_backward.by(ctx.kernel)(
            dz, x if wants[1] else None, weight if wants_x else None, dz.new_empty(0), "none", *dtypes
        )
        return [it if want else None for it, want in zip(results, wants, strict=True)]

    of_bias = dtypes.bias if dbias is None else None
    if not ctx.kind.is_gated or ctx.kind.is_stacked:
        dx, dweight, sums = backward(dz, its.weight, dtypes.weight, of_bias)
        return dx, dweight, sums if dbias is None else dbias, None, None
    dgate, dup = dz.chunk(2, 1)
    dx, dweight, dbias = backward(dgate, its.weight, dtypes.weight, of_bias)
    of_x, *of_up = backward(dup, its.up_weight, dtypes.up_weight, dtypes.up_bias)
    return dx if dx is None or of_x is None else dx + of_x, dweight, dbias, *of_up


def _backward_by_torch(
    ctx: Any, dy: Tensor, x: Tensor, its: Parameters, kept: Tensor, mask: Tensor | None, grad_of_kept: Tensor | None
) -> _Gradients:
    """Return all gradients, differentiable themselves. ``grad_of_kept`` reaches z or h another way."""
    kind, compute = ctx.kind, torch.promote_types(dy.dtype, torch.float32)
    fp32 = [
        None if it is None or mine is None else unchanged(kind.op, *mine).to(it.dtype)
        for it, mine in zip(its, ctx.fp32, strict=True)
    ]
    its = its.replaced(tuple(fp32))
    weight, bias, up_weight, up_bias, out_weight, _ = Parameters(
        *(None if it is None else it.to(compute) for it in its)
    )
    wide_x, wide_dy = None if x is None else x.to(compute), dy.to(compute)
    z = kept.to(compute)
    if kind.recompute and wide_x is not None:
        z = functional.linear(wide_x, weight, bias)
        z = z if up_weight is None else torch.cat((z, functional.linear(wide_x, up_weight, up_bias)), 1)
    dh = wide_dy if out_weight is None else wide_dy @ out_weight
    dh = dh if mask is None else _dropped(dh, mask, kind)
    forward, backward, saves = ACTIVATIONS[kind.activation]
    if kind.is_gated:
        gate, up = z.chunk(2, 1)
        *of_both, h = gradients(dh, gate, up, kind.activation)
        dz = torch.cat(of_both, 1)
    else:
        h = forward(z) if kind.keeps_z or kind.recompute else z
        dh = dh if grad_of_kept is None or kind.keeps_z else dh + grad_of_kept.to(compute)
        dz = backward(dh, z if saves == "z" else h)
    if grad_of_kept is not None and kind.keeps_z:
        dz = dz + grad_of_kept.to(compute)
    h = h if mask is None else _dropped(h, mask, kind)
    weights = weight if up_weight is None or weight is None else torch.cat((weight, up_weight))
    dx = (dz @ weights).to(dy.dtype) if ctx.needs_input_grad[0] else None
    dgate, dup = dz.chunk(2, 1) if kind.is_gated and not kind.is_stacked else (dz, dz)
    layers: tuple[tuple[Tensor, Any], ...] = (dgate, wide_x), (dup, wide_x), (wide_dy, h)
    found: list[Tensor | None] = [dx]
    for (slope, inputs), weight_dtype, bias_dtype in zip(layers, ctx.dtypes[::2], ctx.dtypes[1::2], strict=True):
        found.append(None if weight_dtype is None else (slope.t() @ inputs).to(weight_dtype))
        found.append(None if bias_dtype is None else slope.sum(0).to(bias_dtype))
    return tuple(found)
