"""Linear blocks that train as a whole, as a small autograd Function: each weight wants a gradient, and nothing is
dropped or recomputed. ``autograd_block`` computes every other block, and takes the host longer.

Beside x and the weights, the backward needs z, or h if that tells the activation's slope. A second backward computes z
anew from x and the parameters, by plain torch.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled

from mpkernels._torch_private.ops import unsafe_view
from mpkernels._torch_private.tensors import sum_of_versions
from mpkernels.ops._autocast import without_autocast
from mpkernels.ops._extension import multiplies_halves
from mpkernels.ops.linear.block_gradients import Call, Gradients, Wanted, by_kernels, by_torch, keeps, wanted_of
from mpkernels.ops.linear.block_kind import ROUNDING, Kind, Parameters, begin, ops_by

_LARGE = 1 << 18  # elements: in smaller layers a second op takes longer than the products


class Plan(NamedTuple):
    """What a block does in all calls on tensors of the same shapes, strides, dtypes and wanted gradients."""

    call: Call
    x_shape: tuple[int, ...] | None  #: None if x is a matrix
    keeps_y: bool  #: whether a lone layer's result is what its backward needs


def plan_for(kind: Kind, kernel: str, x: Tensor, params: Parameters, dtype: torch.dtype) -> Plan | None:
    """Return what ``compute`` takes last; None if ``autograd_block`` must compute the block."""
    weights, biases = params[::2], params[1::2]
    is_trained = is_grad_enabled() and all(it is None or it.requires_grad for it in weights)
    if not is_trained or kind.dropout or kind.recompute or not (x.dim() == 2 or (x.dim() > 2 and x.is_contiguous())):
        return None
    if any(it is not None and it.dtype not in (dtype, torch.float32) for it in (x, *params)):
        return None
    outputs, layers = params.sizes(kind)[2], list[Wanted]()
    for weight, bias in zip(weights, biases, strict=True):
        is_rounded = kernel == ROUNDING and weight is not None and weight.dtype is not dtype
        wants = weight is not None, bias is not None and bias.requires_grad
        layers.append(wanted_of(weight, bias, *wants, dtype if is_rounded else None))
    matrix, is_lone = (x.numel() // x.shape[-1], outputs), kind.op == "linear_act"
    makes_dz = x.is_cuda or kernel == "triton" or (dtype is not torch.float32 and multiplies_halves(dtype))
    has_out, keeps_what = params.out_weight is not None, keeps(kind, params.out_weight is not None)
    call = Call(
        kind, ops_by(kernel), matrix, (*x.shape[:-1], outputs), has_out, x.requires_grad,
        tuple(layers[:1] if is_lone else layers), keeps_what,
        is_large=is_lone and keeps_what != "" and makes_dz and matrix[0] * outputs >= _LARGE,
        nothing=torch.empty(0, dtype=dtype, device=x.device),
    )  # fmt: skip
    return Plan(call, None if x.dim() == 2 else x.shape, is_lone and keeps_what == "h")


class _TrainedBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *arguments: Any) -> Tensor:
        *params, casts, plan = arguments
        ctx.plan = plan, params, sum_of_versions(params)
        call: Call = plan.call
        used = params if casts is None else casts
        y, z = begin(call.kind, call.ops, x if plan.x_shape is None else _rows(x), True, *used)
        kept = z if call.keeps == "z" else y
        if call.has_out:
            y, _ = call.ops.act(y, used[4], used[5], "none", False)
        if plan.x_shape is not None:
            y = unsafe_view(y, call.shape)
        if plan.keeps_y:
            kept = y
        weight, up = (used[0], used[2] if len(used) > 2 else None) if call.wants_x else (None, None)
        saved = (weight, None) if len(used) == 2 else (weight, None, up, None, used[4], None)
        ctx.save_for_backward(x, *saved, kept if call.keeps else None, None)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Gradients:
        plan, *noted = ctx.plan
        saved, call = list(ctx.saved_tensors), plan.call
        if is_grad_enabled():
            return _differentiable(dy, saved[0], plan, *noted)
        ctx.maybe_clear_saved_tensors()  # unless the graph is retained
        if plan.x_shape is None:
            return *by_kernels(call, dy, saved), None, None
        saved[0], dy = _rows(saved[0]), dy.reshape(call.matrix)
        saved[-2] = _rows(saved[-2]) if plan.keeps_y else saved[-2]
        dx, *others = by_kernels(call, dy, saved)
        return dx if dx is None else dx.view(plan.x_shape), *others, None, None


# compute(x, *params, casts, plan), without the search for transforms that are over, with which Function.apply begins
# before torch 2.14. ``casts`` are the parameters in the products' dtype, or None if they have it.
compute: Any = super(torch.autograd.Function, _TrainedBlock).apply


def _rows(x: Tensor) -> Tensor:
    return x.view(-1, x.shape[-1])


def _differentiable(dy: Tensor, x: Tensor, plan: Plan, params: Any, versions: object) -> Gradients:
    """Return the gradients by plain torch, so that they can be differentiated."""
    call = plan.call._replace(kind=plan.call.kind._replace(recompute=True), fp32=params, versions=versions)
    casts = [None if it is None else call.nothing for it in params]  # of a cast, the dtype alone counts
    with without_autocast(dy):
        saved = [x.reshape(call.matrix[0], -1), *casts, None, None]
        dx, *others = by_torch(call, dy.reshape(call.matrix), saved, None)
    return None if dx is None else dx.view(x.shape), *others, None, None
