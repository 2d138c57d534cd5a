"""Linear blocks that train as a whole, as an autograd Function with a short forward: each weight wants a gradient, and
nothing is dropped or recomputed. ``autograd_block`` computes every other block, and takes the host longer."""

from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from mpkernels._torch_private.ops import unsafe_view
from mpkernels._torch_private.tensors import sum_of_versions
from mpkernels.ops._extension import multiplies_halves
from mpkernels.ops.linear.autograd_block import gradients_of
from mpkernels.ops.linear.block_gradients import Call, Fp32, Gradients, Wanted, keeps, wanted_of
from mpkernels.ops.linear.block_kind import ROUNDING, Kind, Parameters, begin, ops_by

_LARGE = 1 << 18  # elements of z: to free fewer isn't worth the host's time for a second op


def call_for(kind: Kind, kernel: str, x: Tensor, params: Parameters, dtype: torch.dtype) -> Call | None:
    """Return what ``compute`` takes last, in all calls on tensors of the same shapes, strides, dtypes and wanted
    gradients. None if ``autograd_block`` must compute the block. ``dtype`` is that of the products."""
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
    has_out, of_forward = params.out_weight is not None, keeps(kind, params.out_weight is not None)
    return Call(
        kind, ops_by(kernel), matrix, (*x.shape[:-1], outputs), has_out, x.requires_grad,
        tuple(layers[:1] if is_lone else layers), of_forward,
        is_large=is_lone and of_forward != "" and makes_dz and matrix[0] * outputs >= _LARGE,
        nothing=torch.empty(0, dtype=dtype, device=x.device), x_shape=None if x.dim() == 2 else x.shape,
    )  # fmt: skip


class _TrainedBlock(torch.autograd.Function):
    """As ``autograd_block`` has it, but for the mask: y, and what the backward keeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor | None]:
        *params, casts, call = arguments
        used = params if casts is None else casts
        ctx.call, ctx.fp32 = call, None if casts is None else Fp32(params, sum_of_versions(params))
        ctx.set_materialize_grads(False)
        rows = x if call.x_shape is None else x.view(call.matrix[0], -1)
        y, z = begin(call.kind, call.ops, rows, True, *used)
        kept = z if call.keeps == "z" else y if call.has_out else None
        if call.has_out:
            y, _ = call.ops.act(y, used[4], used[5], "none", False)
        if call.x_shape is not None:
            y = unsafe_view(y, call.shape)
        weight, up = (used[0], used[2] if len(used) > 2 else None) if call.wants_x else (None, None)
        saved = (weight, None) if len(used) == 2 else (weight, None, up, None, used[4], None)
        ctx.save_for_backward(x, *saved, y if kept is None and call.keeps else kept, None)
        return y, kept

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, grad_of_kept: Tensor | None) -> Gradients:
        return *gradients_of(ctx, dy, grad_of_kept), None, None


# Without the search for transforms that are over, with which Function.apply begins before torch 2.14.
_apply: Any = super(torch.autograd.Function, _TrainedBlock).apply


def compute(x: Tensor, *params_casts_and_call: Any) -> Tensor:
    """Compute the block of x and the parameters. The casts are the parameters in the products' dtype, or None."""
    y: Tensor = _apply(x, *params_casts_and_call)[0]
    return y
