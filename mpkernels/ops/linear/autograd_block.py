"""A linear block as one differentiable function.

The forward keeps z, the activation's input, and the backward computes h, the input of the last layer, anew. If the
activation's result tells its slope, an ungated block keeps h instead, which without a last layer is y. With
``recompute``, a block keeps x alone. A dropout's mask is kept as bools.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mpkernels._torch_private.modes import derives_forward
from mpkernels._torch_private.ops import unsafe_view
from mpkernels._torch_private.tensors import sum_of_versions
from mpkernels.ops._autocast import without_autocast
from mpkernels.ops.linear.block_gradients import Call, Fp32, Gradients, Wanted, by_kernels, by_torch, keeps, wanted_of
from mpkernels.ops.linear.block_kind import ROUNDING, Kind, Parameters, begin, ops_by, replaced

Casts = tuple[Tensor | None, ...] | None  # fp32 parameters in x's dtype; None for other parameters
_NO_GRADIENTS_OF_SETTINGS = None, None, None, None  # casts, kind, kernel and shape have no gradients


def compute(kind: Kind, x: Tensor, params: Parameters, casts: Casts, kernel: str, shape: tuple[int, ...]) -> Tensor:
    """Return the block's result for matrix x, in the ``shape`` that is wanted.

    ``casts`` has the fp32 parameters in x's dtype; ``kernel`` is as ``Op.by`` takes it.
    """
    if derives_forward() or (torch.is_grad_enabled() and (params.weight.requires_grad or _wants(x, params))):
        tensors = _each_once(x, *params) if torch.compiler.is_compiling() else (x, *params)
        y: Tensor = _Block.apply(*tensors, casts, kind, kernel, shape)[0]  # type: ignore[no-untyped-call]
        return y
    h, _ = begin(kind, ops_by(kernel), x, False, *(params if casts is None else replaced(params, casts)))
    if params.out_weight is None:
        return h if h.shape == shape else unsafe_view(h, shape)
    h = functional.dropout(h, kind.dropout) if kind.dropout else h
    last = None if casts is None else (*casts[4:], None, None, None, None)
    return compute(Kind(kind.op, "none"), h, Parameters(params.out_weight, params.out_bias), last, kernel, shape)


def _each_once(*tensors: Any) -> list[Any]:
    """Return the tensors, with views for those that come again: torch.compile refuses to pass one tensor twice. It also
    breaks at ``any`` of a generator, hence the lists."""
    return [
        it.view_as(it) if it is not None and True in [it is earlier for earlier in tensors[:at]] else it
        for at, it in enumerate(tensors)
    ]


def _wants(x: Tensor, params: Parameters) -> bool:
    """Return whether x or a parameter of the first layers wants a gradient."""
    return any(it is not None and it.requires_grad for it in (x, *params[:4]))


class _Block(torch.autograd.Function):
    """Besides y, it returns what the backward keeps: z or h, through which a second backward reaches x and the weights,
    and the dropout's mask. Only with ROUNDING are gradients of fp32 parameters rounded to 16 bits."""

    # There is no setup_context: beside one, torch looks up the forward's signature in each call.
    @staticmethod
    def forward(ctx: Any, x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        *params, casts, kind, kernel, shape = arguments
        used = Parameters(*(params if casts is None else replaced(params, casts)))
        ops, mask, has_out = ops_by(kernel), None, used.out_weight is not None
        h, z = begin(kind, ops, x, not kind.recompute, *used)
        y = h
        if has_out:
            if kind.dropout:
                h, mask = torch.native_dropout(h, kind.dropout, True)
            y, _ = ops.act(h, used.out_weight, used.out_bias, "none", False)
        # No in-place change of a view is allowed. The view is made before y is saved, so that changes of y are seen.
        y = y if y.shape == shape else unsafe_view(y, shape)
        kept = None if kind.recompute else z if kind.keeps_z else h if has_out else None
        wants_x, *wants = ctx.needs_input_grad
        layers = tuple(_wanted(params, casts, wants, at, kernel) for at in (0, 2, 4))
        call = Call(kind, ops, (x.shape[0], shape[-1]), shape, has_out, wants_x, layers, keeps(kind, has_out))
        ctx.call, ctx.fp32 = call, None
        if casts is not None:
            fp32 = [None if cast is None else mine for mine, cast in zip(params, casts, strict=True)]
            ctx.fp32 = Fp32(fp32, sum_of_versions(fp32))
        ctx.set_materialize_grads(False)
        _save(ctx, x, used, y if call.is_lone and call.keeps == "h" and not kind.recompute else kept, mask)
        return y, kept, mask

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, grad_of_kept: Tensor | None, _: Tensor | None) -> Gradients:
        return *gradients_of(ctx, dy, grad_of_kept), *_NO_GRADIENTS_OF_SETTINGS


def gradients_of(ctx: Any, dy: Tensor | None, grad_of_kept: Tensor | None) -> Gradients:
    """Return all gradients that are wanted, from what a forward has given to autograd's context: ``call``, ``fp32`` and
    saved tensors."""
    call: Call = ctx.call
    is_compiling = torch.compiler.is_compiling()
    if is_compiling or call.kind.recompute:
        grad_of_kept = None  # torch.compile passes zeros: it knows no second backward
    if dy is None and grad_of_kept is None:
        return None, *(None for _ in call.layers * 2)
    saved = list(ctx.saved_tensors)
    if not is_compiling:
        ctx.maybe_clear_saved_tensors()  # unless the graph is retained
    if dy is None:
        dy = grad_of_kept.new_zeros(call.matrix)  # type: ignore[union-attr]
    elif call.shape != call.matrix:  # a reshape takes as long as a small layer's kernel
        dy = dy.reshape(call.matrix)
        saved[-2] = saved[-2].reshape(call.matrix) if call.is_lone and call.keeps == "h" else saved[-2]
    if call.x_shape is not None and saved[0] is not None:
        saved[0] = saved[0].reshape(call.matrix[0], -1)
    if grad_of_kept is None and (is_compiling or not torch.is_grad_enabled()):
        dx, *others = by_kernels(call, dy, saved)
    else:
        with without_autocast(dy):
            dx, *others = by_torch(call, dy, saved, grad_of_kept, ctx.fp32)
    return dx if dx is None or call.x_shape is None else dx.view(call.x_shape), *others


def _save(ctx: Any, x: Tensor, params: Parameters, kept: Tensor | None, mask: Tensor | None) -> None:
    """Save what the backward needs; with ``recompute``, what the forward needs, too."""
    call: Call = ctx.call
    needs_all, (first, up, _) = call.kind.recompute, call.layers
    saved = params._replace(out_bias=None)
    if not needs_all:
        saved = saved._replace(bias=None, up_bias=None)
        saved = saved if call.wants_x else saved._replace(weight=None, up_weight=None)
    needs_x = needs_all or first.weight is not None or up.weight is not None
    ctx.save_for_backward(x if needs_x else None, *saved, kept, mask)


def _wanted(params: Sequence[Any], casts: Casts, wants: Sequence[bool], at: int, kernel: str) -> Wanted:
    """Return which gradients of the layer are wanted whose weight is parameter ``at``."""
    cast = casts[at] if kernel == ROUNDING and casts is not None else None  # a weight that autocast has cast
    rounded_to = None if cast is None else cast.dtype
    return wanted_of(params[at], params[at + 1], wants[at], wants[at + 1], rounded_to)
