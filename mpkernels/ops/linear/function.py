"""A linear block as one differentiable function.

Its backward keeps z, which the activation was taken of, and computes h, the input of the last layer, anew. After an
activation whose result tells its slope, an ungated block keeps h instead, which without a last layer is y. With
``recompute`` it keeps x alone. Of a dropout it keeps the mask, as bools.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mpkernels._torch_private.modes import are_transforms_active
from mpkernels._torch_private.ops import unsafe_view
from mpkernels._torch_private.tensors import derives_forward, version_of
from mpkernels.ops._autocast import without_autocast
from mpkernels.ops.linear.activations import ACTIVATIONS
from mpkernels.ops.linear.kind import ROUNDING, Kind, Parameters, begin
from mpkernels.ops.linear.linear_act import _linear_act, _linear_act_backward, weight_gradient
from mpkernels.ops.linear.linear_dact import _linear_dact
from mpkernels.ops.linear.linear_gated import _linear_dgated, gradients

Casts = tuple[Tensor | None, ...] | None  # of each parameter that is fp32, its value in x's dtype
_Gradients = tuple[Tensor | None, ...]


def linear_act(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    shape: tuple[int, ...],
    cast: tuple[Tensor, Tensor | None] | None = None,
    kernel: str = "dispatched",
) -> Tensor:
    """``f(x W^T + b)`` of matrices in one dtype, in the ``shape`` that is wanted, differentiable as often as you like;
    see mpkernels.functional.

    ``cast`` is weight and bias in x's dtype, where their own is fp32; ``kernel`` as ``Op.by`` takes it.
    """
    casts = None if cast is None else (*cast, None, None, None, None)
    kernel = "reference" if x.dtype == torch.float64 else kernel
    return compute(Kind("linear_act", activation), x, Parameters(weight, bias), casts, kernel, shape)


def compute(kind: Kind, x: Tensor, own: Parameters, casts: Casts, kernel: str, shape: tuple[int, ...]) -> Tensor:
    """Return the block's result for matrix x, in the ``shape`` that is wanted."""
    wants, transforms = torch.is_grad_enabled(), are_transforms_active()
    wants = wants and any(it is not None and it.requires_grad for it in (x, *own[:4]))
    if wants or transforms or derives_forward():
        apply: Any = _Block.apply if transforms or torch.compiler.is_compiling() else _apply
        y: Tensor = apply(x, *own, casts, kind, kernel, shape)[0]
        return y
    with torch.no_grad():
        h, _ = begin(kind, x, own.replaced(casts), kernel, save=False)
    if own.out_weight is None:
        return h if h.shape == shape else unsafe_view(h, shape)
    h = functional.dropout(h, kind.dropout) if kind.dropout else h
    last = None if casts is None else (*casts[4:], None, None, None, None)
    return compute(Kind(kind.op, "none"), h, Parameters(own.out_weight, own.out_bias), last, kernel, shape)


class _Block(torch.autograd.Function):
    """Its further results are what the backward keeps: z or h, through which a second backward finds its way to x and
    the weights, and the dropout's mask. The gradients of fp32 parameters are never rounded to 16 bits, but with
    ROUNDING."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        *parameters, casts, kind, kernel, shape = arguments
        its = Parameters(*parameters).replaced(casts)
        h, z = begin(kind, x, its, kernel, save=not kind.recompute)
        y, mask, has_out = h, None, its.out_weight is not None
        if has_out:
            if kind.dropout:
                h, mask = torch.native_dropout(h, kind.dropout, True)
            y, _ = _linear_act.by(kernel)(h, its.out_weight, its.out_bias, "none", False)
        kept = None if kind.recompute else z if kind.keeps_z else h if has_out else None
        # No view, which autograd would not let be changed in place; and before y is saved, to see it changed.
        return y if y.shape == shape else unsafe_view(y, shape), kept, mask

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor | None, Tensor | None]) -> None:
        x, *parameters, casts, ctx.kind, ctx.kernel, shape = inputs
        own = Parameters(*parameters)
        its, (y, kept, mask) = own.replaced(casts), output
        ctx.matrix = x.shape[0], its.sizes(ctx.kind)[2]
        ctx.shape = None if shape == ctx.matrix else shape
        ctx.set_materialize_grads(False)
        if mask is not None:
            ctx.mark_non_differentiable(mask)
        if own.out_weight is None and not ctx.kind.is_gated and ACTIVATIONS[ctx.kind.activation].saves == "y":
            kept = y
        _save(ctx, x, own, its, kept, mask)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, grad_of_kept: Tensor | None, _: Tensor | None) -> _Gradients:
        is_compiling = torch.compiler.is_compiling()
        if is_compiling or ctx.kind.recompute:
            grad_of_kept = None  # zeros of torch.compile's, which knows no second backward
        if dy is None and grad_of_kept is None:
            return (None,) * 11
        x, *parameters, kept, mask = ctx.saved_tensors
        its = Parameters(*parameters)
        is_lone = not (ctx.kind.is_gated or ctx.has_out)
        if dy is None:
            dy = grad_of_kept.new_zeros(ctx.matrix)  # type: ignore[union-attr]
        elif ctx.shape is not None:  # which y came in; in a small layer, a reshape takes as long as a kernel
            dy = dy.reshape(ctx.matrix)
            kept = kept.reshape(ctx.matrix) if is_lone and kept is not None else kept
        if grad_of_kept is None and (is_compiling or not torch.is_grad_enabled()):
            if is_lone:
                saved = dy.new_empty(0) if kept is None else kept
                return *_layer(ctx, 0, dy, x, its.weight, saved, ctx.kind.activation), *(None,) * 8
            dz, dbias, *of_out = _backward_of_out(ctx, dy, x, its, kept, mask)
            return *_backward_of_first(ctx, dz, dbias, x, its), *of_out, *(None,) * 4
        with without_autocast(dy):
            return *_backward_by_torch(ctx, dy, x, its, kept, mask, grad_of_kept), *(None,) * 4


# What _Block.apply comes to where no transform is active, but for forward's signature, which it looks up each time:
# that takes longer than both kernels of a small layer.
_apply = super(torch.autograd.Function, _Block).apply


def _save(ctx: Any, x: Tensor, own: Parameters, its: Parameters, kept: Tensor | None, mask: Tensor | None) -> None:
    """Save what the gradients that are wanted need."""
    wants_x, *wants = ctx.needs_input_grad[:7]
    ctx.has_out, dtypes, fp32 = own.out_weight is not None, [], []
    for mine, cast, want in zip(own, its, wants, strict=True):
        is_rounded = want and ctx.kernel == ROUNDING and mine.dim() == 2
        dtypes.append((x.dtype if is_rounded else grad_dtype(mine)) if want else None)
        # For a second backward. fp32 ones aren't saved: they may be stepped before the backward, which needs casts.
        fp32.append(None if mine is cast or mine.is_inference() else (mine, version_of(mine)))
    ctx.dtypes, ctx.fp32 = Parameters(*dtypes), fp32
    ctx.by_columns = [dtypes[at] is not None and lies_by_columns(own[at]) for at in (0, 2, 4)]
    again = ctx.kind.recompute
    weight, bias, up_weight, up_bias, out_weight, _ = its
    ctx.save_for_backward(
        x if again or ctx.dtypes.weight or ctx.dtypes.up_weight else None,
        weight if wants_x or again else None,
        bias if again else None,
        up_weight if wants_x or again else None,
        up_bias if again else None,
        out_weight,
        None,
        kept,
        mask,
    )


def grad_dtype(parameter: Tensor) -> torch.dtype:
    """``parameter.grad_dtype = torch.float32`` asks for fp32 of a 16-bit parameter; autograd makes other widths."""
    if parameter.dtype == torch.float32:
        return torch.float32
    if torch.compiler.is_compiling() or are_transforms_active() or not parameter.is_leaf:
        return parameter.dtype
    return torch.float32 if parameter.grad_dtype == torch.float32 else parameter.dtype


def lies_by_columns(weight: Tensor) -> bool:
    """Return whether the matrix is the transpose of a contiguous one. Its gradient then lies likewise, which adds up
    without a detour."""
    return weight.dim() == 2 and not weight.is_contiguous() and weight.t().is_contiguous()


def _layer(
    ctx: Any, number: int, dz: Tensor, x: Tensor | None, weight: Tensor | None, saved: Tensor, activation: str,
    wants_bias: bool = True,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of x, weight and bias of the block's layer of that number, where they are wanted."""
    weight_dtype, bias_dtype = ctx.dtypes[2 * number : 2 * number + 2]
    wants = number < 2 and ctx.needs_input_grad[0], weight_dtype is not None, wants_bias and bias_dtype is not None
    if not any(wants):
        return None, None, None
    dx, dweight, dbias = _linear_act_backward.by(ctx.kernel)(
        dz, x if wants[1] else None, weight if wants[0] else None, saved, activation,
        weight_dtype, bias_dtype if wants[2] else None, ctx.by_columns[number],
    )  # fmt: skip
    return dx if wants[0] else None, dweight if wants[1] else None, dbias if wants[2] else None


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
    return dz, dbias, *_layer(ctx, 2, dy, h, None, nothing, "none")[1:]


def _dropped(value: Tensor, mask: Tensor, kind: Kind) -> Tensor:
    return value * mask * (0.0 if kind.dropout == 1 else 1 / (1 - kind.dropout))


def _backward_of_first(ctx: Any, dz: Tensor, dbias: Tensor | None, x: Tensor | None, its: Parameters) -> _Gradients:
    """Return the gradients of x and of the first layer's parameters."""
    nothing = dz.new_empty(0)
    if not ctx.kind.is_gated or ctx.kind.is_stacked:
        dx, dweight, sums = _layer(ctx, 0, dz, x, its.weight, nothing, "none", wants_bias=dbias is None)
        return dx, dweight, sums if dbias is None else dbias, None, None
    dgate, dup = dz.chunk(2, 1)
    dx, *of_gate = _layer(ctx, 0, dgate, x, its.weight, nothing, "none")
    of_x, *of_up = _layer(ctx, 1, dup, x, its.up_weight, nothing, "none")
    return dx if dx is None or of_x is None else dx + of_x, *of_gate, *of_up


def _backward_by_torch(
    ctx: Any,
    dy: Tensor,
    x: Tensor,
    its: Parameters,
    kept: Tensor | None,
    mask: Tensor | None,
    grad_of_kept: Tensor | None,
) -> _Gradients:
    """Return all gradients, differentiable themselves. ``grad_of_kept`` reaches z or h another way."""
    kind, compute = ctx.kind, torch.promote_types(dy.dtype, torch.float32)
    fp32 = [
        None if it is None or mine is None else _unchanged(kind.op, *mine).to(it.dtype)
        for it, mine in zip(its, ctx.fp32, strict=True)
    ]
    its = its.replaced(tuple(fp32))
    weight, bias, up_weight, up_bias, out_weight, _ = Parameters(
        *(None if it is None else it.to(compute) for it in its)
    )
    wide_x, wide_dy = None if x is None else x.to(compute), dy.to(compute)
    z = wide_dy if kept is None else kept.to(compute)
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
    for number, (slope, inputs) in enumerate(layers):
        weight_dtype, bias_dtype = ctx.dtypes[2 * number : 2 * number + 2]
        dweight = None if weight_dtype is None else weight_gradient(slope, inputs, ctx.by_columns[number])
        found.append(None if dweight is None else dweight.to(weight_dtype))
        found.append(None if bias_dtype is None else slope.sum(0).to(bias_dtype))
    return tuple(found)


def _unchanged(op: str, weight: Tensor, version: object) -> Tensor:
    if version_of(weight) != version:
        raise RuntimeError(f"{op}: a weight was modified in place before a second backward that needs its old value")
    return weight
