"""A linear block as one differentiable function.

The forward keeps z, the activation's input, and the backward computes h, the input of the last layer, anew. If the
activation's result tells its slope, an ungated block keeps h instead, which without a last layer is y. With
``recompute``, a block keeps x alone. A dropout's mask is kept as bools.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from mpkernels._torch_private.ops import unsafe_view
from mpkernels._torch_private.tensors import derives_forward, version_of
from mpkernels.ops._autocast import without_autocast
from mpkernels.ops.linear.activations import ACTIVATIONS
from mpkernels.ops.linear.block_kind import ROUNDING, Kind, Parameters, begin, grad_dtype, lies_by_columns, replaced
from mpkernels.ops.linear.linear_act import _linear_act, _linear_act_backward, weight_gradient
from mpkernels.ops.linear.linear_dact import _linear_dact
from mpkernels.ops.linear.linear_gated import _linear_dgated, gradients

Casts = tuple[Tensor | None, ...] | None  # fp32 parameters in x's dtype; None for other parameters
_Gradients = tuple[Tensor | None, ...]
_Dtypes = tuple[torch.dtype | None, ...]


def compute(kind: Kind, x: Tensor, params: Parameters, casts: Casts, kernel: str, shape: tuple[int, ...]) -> Tensor:
    """Return the block's result for matrix x, in the ``shape`` that is wanted.

    ``casts`` has the fp32 parameters in x's dtype; ``kernel`` is as ``Op.by`` takes it.
    """
    if derives_forward() or (torch.is_grad_enabled() and (params.weight.requires_grad or _wants(x, params))):
        apply: Any = _Block.apply if torch.compiler.is_compiling() else _apply
        count = 2 if kind.op == "linear_act" else len(params)  # each argument costs a small layer time
        y: Tensor = apply(x, *params[:count], casts and casts[:count], kind, kernel, shape)[0]
        return y
    h, _ = begin(kind, x, kernel, False, *(params if casts is None else replaced(params, casts)))
    if params.out_weight is None:
        return h if h.shape == shape else unsafe_view(h, shape)
    h = functional.dropout(h, kind.dropout) if kind.dropout else h
    last = None if casts is None else (*casts[4:], None, None, None, None)
    return compute(Kind(kind.op, "none"), h, Parameters(params.out_weight, params.out_bias), last, kernel, shape)


def _wants(x: Tensor, params: Parameters) -> bool:
    """Return whether x or a parameter of the first layers wants a gradient."""
    return any(it is not None and it.requires_grad for it in (x, *params[:4]))


class _Call(NamedTuple):
    """What a backward has to know, besides tensors. The forward makes one plain tuple: each attribute of autograd's
    context takes long in a small layer."""

    kind: Kind
    kernel: str
    matrix: tuple[int, int]  #: y's shape as a matrix
    shape: tuple[int, ...]  #: in which y was returned
    has_out: bool
    wants_x: bool
    dtypes: _Dtypes  #: of the gradients that are wanted, one for each of the Parameters
    by_columns: tuple[bool, ...]  #: whether each weight's gradient lies by columns
    fp32: list[tuple[Tensor, object] | None] | None


class _Block(torch.autograd.Function):
    """Besides y, it returns what the backward keeps: z or h, through which a second backward reaches x and the weights,
    and the dropout's mask. Only with ROUNDING are gradients of fp32 parameters rounded to 16 bits."""

    # A lone layer passes no loop: in a small one, each loop takes as long as its kernel. There is no setup_context:
    # beside one, torch looks up the forward's signature in each call, which takes longer than both kernels.
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        *others, casts, kind, kernel, shape = arguments
        params = (weight, bias, *others) if casts is None else replaced((weight, bias, *others), casts)
        h, z = begin(kind, x, kernel, not kind.recompute, *params)
        y, mask, has_out = h, None, len(params) > 2 and params[4] is not None
        if has_out:
            if kind.dropout:
                h, mask = torch.native_dropout(h, kind.dropout, True)
            y, _ = _linear_act.by(kernel)(h, params[4], params[5], "none", False)
        kept = None if kind.recompute else z if kind.keeps_z else h if has_out else None
        # No in-place change of a view is allowed. The view is made before y is saved, so that changes of y are seen.
        output = y if y.shape == shape else unsafe_view(y, shape), kept, mask
        _save(ctx, (x, weight, bias, *arguments), output)
        return output

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, grad_of_kept: Tensor | None, _: Tensor | None) -> _Gradients:
        call, is_compiling = _Call(*ctx.call), torch.compiler.is_compiling()
        if is_compiling or call.kind.recompute:
            grad_of_kept = None  # torch.compile passes zeros: it knows no second backward
        rest = None, None, None, None
        if dy is None and grad_of_kept is None:
            return None, *(None for _ in call.dtypes), *rest
        x, *kept_params, kept, mask = ctx.saved_tensors
        params = Parameters(*kept_params)
        is_lone = not (call.kind.is_gated or call.has_out)
        if dy is None:
            dy = grad_of_kept.new_zeros(call.matrix)  # type: ignore[union-attr]
        elif call.shape != call.matrix:  # a reshape takes as long as a small layer's kernel
            dy = dy.reshape(call.matrix)
            kept = kept.reshape(call.matrix) if is_lone and kept is not None else kept
        if grad_of_kept is None and (is_compiling or not torch.is_grad_enabled()):
            if is_lone:
                saved = dy.new_empty(0) if kept is None else kept
                found = _layer(call, 0, dy, x, params.weight, saved, call.kind.activation)
                return (*found, *rest) if len(call.dtypes) == 2 else (*found, *rest, *rest)
            dz, dbias, *out_gradients = _backward_of_out(call, dy, x, params, kept, mask)
            return *_backward_of_first(call, dz, dbias, x, params), *out_gradients, *rest
        with without_autocast(dy):
            return *_backward_by_torch(call, dy, x, params, kept, mask, grad_of_kept), *rest


# _Block.apply without the search for transforms that are over, with which it begins before torch 2.14.
_apply = super(torch.autograd.Function, _Block).apply


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor | None, Tensor | None]) -> None:
    """Give autograd's context what the backward needs."""
    x, weight, bias, *others, casts, kind, kernel, shape = inputs
    (y, kept, mask), recomputes = output, kind.recompute
    wants_x, wants_weight, wants_bias, *wants = ctx.needs_input_grad
    dtypes: _Dtypes = (grad_dtype(weight) if wants_weight else None, grad_dtype(bias) if wants_bias else None)
    by_columns: tuple[bool, ...] = (wants_weight and lies_by_columns(weight),)
    has_out, fp32 = False, None
    if others:
        has_out = others[2] is not None
        dtypes += tuple(grad_dtype(it) if want else None for it, want in zip(others, wants, strict=False))
        by_columns += tuple(want and lies_by_columns(it) for it, want in zip(others[::2], wants[::2], strict=False))
    if kernel == ROUNDING and casts is not None:  # the weights that autocast has cast
        pairs = enumerate(zip(dtypes, casts, strict=False))
        dtypes = tuple(x.dtype if it and cast is not None and at % 2 == 0 else it for at, (it, cast) in pairs)
    if casts is not None:
        fp32 = _noted((weight, bias, *others), casts)
        weight, bias, *others = replaced((weight, bias, *others), casts)
    ctx.call = kind, kernel, (x.shape[0], shape[-1]), shape, has_out, wants_x, dtypes, by_columns, fp32
    ctx.set_materialize_grads(False)
    if kept is None and not (has_out or recomputes) and ACTIVATIONS[kind.activation].saves == "y":
        kept = y
    if others and not recomputes:
        others = [others[0] if wants_x else None, None, others[2], None]
    ctx.save_for_backward(
        x if recomputes or wants_weight or (others and dtypes[2]) else None,
        weight if wants_x or recomputes else None,
        bias if recomputes else None,
        *others,
        kept,
        mask,
    )


def _noted(params: Sequence[Any], casts: tuple[Tensor | None, ...]) -> list[tuple[Tensor, object] | None]:
    """Return the fp32 parameters and their versions, which a second backward needs. The parameters aren't saved,
    because they may be stepped before the first backward, which needs only their casts."""
    pairs = zip(params, casts, strict=True)
    return [None if cast is None or mine.is_inference() else (mine, version_of(mine)) for mine, cast in pairs]


def _layer(
    call: _Call, number: int, dz: Tensor, x: Tensor | None, weight: Tensor | None, saved: Tensor, activation: str,
    wants_bias: bool = True,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of x, weight and bias of the block's layer ``number``, where they are wanted."""
    weight_dtype, bias_dtype = call.dtypes[2 * number : 2 * number + 2]
    wants = number < 2 and call.wants_x, weight_dtype is not None, wants_bias and bias_dtype is not None
    if not any(wants):
        return None, None, None
    dx, dweight, dbias = _linear_act_backward.by(call.kernel)(
        dz, x if wants[1] else None, weight if wants[0] else None, saved, activation,
        weight_dtype, bias_dtype if wants[2] else None, call.by_columns[number],
    )  # fmt: skip
    return dx if wants[0] else None, dweight if wants[1] else None, dbias if wants[2] else None


def _backward_of_out(
    call: _Call, dy: Tensor, x: Tensor, params: Parameters, kept: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of z, of its bias (if a kernel has summed it up), and of the last layer's parameters."""
    kind, dtypes, nothing = call.kind, call.dtypes, dy.new_empty(0)
    if kind.recompute:
        h, z = begin(kind, x, call.kernel, True, *params)
        kept = z if kind.keeps_z else h
    wants_h, dbias = dtypes[4] is not None, None
    if kind.is_gated:
        dz, h = _linear_dgated.by(call.kernel)(dy, params.out_weight, kept, kind.activation, wants_h)
    else:
        saved = kept if ACTIVATIONS[kind.activation].saves else nothing
        bias_dtype = dtypes[1] if mask is None else None
        dz, dbias, anew = _linear_dact.by(call.kernel)(
            dy, params.out_weight, saved, kind.activation, bias_dtype, wants_h
        )
        dbias = None if bias_dtype is None else dbias
        h = anew if kind.keeps_z else kept
    if mask is not None:
        h = _dropped(h, mask, kind) if wants_h else h
        dz = _dropped(dz.view(len(mask), -1, mask.shape[1]), mask.unsqueeze(1), kind).view(dz.shape)
    return dz, dbias, *_layer(call, 2, dy, h, None, nothing, "none")[1:]


def _dropped(value: Tensor, mask: Tensor, kind: Kind) -> Tensor:
    return value * mask * (0.0 if kind.dropout == 1 else 1 / (1 - kind.dropout))


def _backward_of_first(
    call: _Call, dz: Tensor, dbias: Tensor | None, x: Tensor | None, params: Parameters
) -> _Gradients:
    """Return the gradients of x and of the first layer's parameters."""
    nothing = dz.new_empty(0)
    if not call.kind.is_gated or call.kind.is_stacked:
        dx, dweight, sums = _layer(call, 0, dz, x, params.weight, nothing, "none", wants_bias=dbias is None)
        return dx, dweight, sums if dbias is None else dbias, None, None
    dgate, dup = dz.chunk(2, 1)
    dx_by_gate, *gate_gradients = _layer(call, 0, dgate, x, params.weight, nothing, "none")
    dx_by_up, *up_gradients = _layer(call, 1, dup, x, params.up_weight, nothing, "none")
    dx = dx_by_gate if dx_by_gate is None or dx_by_up is None else dx_by_gate + dx_by_up
    return dx, *gate_gradients, *up_gradients


def _backward_by_torch(
    call: _Call, dy: Tensor, x: Tensor, params: Parameters, kept: Tensor | None, mask: Tensor | None,
    grad_of_kept: Tensor | None,
) -> _Gradients:  # fmt: skip
    """Return all gradients, themselves differentiable. ``grad_of_kept`` is the gradient of the kept z or h, which
    a second backward brings."""
    kind, compute = call.kind, torch.promote_types(dy.dtype, torch.float32)
    if call.fp32 is not None:
        pairs = zip(params, call.fp32, strict=False)  # a lone layer has two
        params = Parameters(
            *(it if it is None or mine is None else _unchanged(kind.op, *mine).to(it.dtype) for it, mine in pairs)
        )
    weight, bias, up_weight, up_bias, out_weight, _ = Parameters(
        *(None if it is None else it.to(compute) for it in params)
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
        *slopes, h = gradients(dh, gate, up, kind.activation)
        dz = torch.cat(slopes, 1)
    else:
        h = forward(z) if kind.keeps_z or kind.recompute else z
        dh = dh if grad_of_kept is None or kind.keeps_z else dh + grad_of_kept.to(compute)
        dz = backward(dh, z if saves == "z" else h)
    if grad_of_kept is not None and kind.keeps_z:
        dz = dz + grad_of_kept.to(compute)
    h = h if mask is None else _dropped(h, mask, kind)
    weights = weight if up_weight is None or weight is None else torch.cat((weight, up_weight))
    dx = (dz @ weights).to(dy.dtype) if call.wants_x else None
    dgate, dup = dz.chunk(2, 1) if kind.is_gated and not kind.is_stacked else (dz, dz)
    layers: tuple[tuple[Tensor, Any], ...] = (dgate, wide_x), (dup, wide_x), (wide_dy, h)
    found: list[Tensor | None] = [dx]
    for number, (slope, inputs) in enumerate(layers[: len(call.dtypes) // 2]):
        weight_dtype, bias_dtype = call.dtypes[2 * number : 2 * number + 2]
        dweight = None if weight_dtype is None else weight_gradient(slope, inputs, call.by_columns[number])
        found.append(None if dweight is None else dweight.to(weight_dtype))
        found.append(None if bias_dtype is None else slope.sum(0).to(bias_dtype))
    return tuple(found)


def _unchanged(op: str, weight: Tensor, version: object) -> Tensor:
    if version_of(weight) != version:
        raise RuntimeError(f"{op}: a weight was modified in place before a second backward that needs its old value")
    return weight
