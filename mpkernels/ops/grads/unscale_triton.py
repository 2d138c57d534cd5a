"""unscale_ in Triton: one program per chunk."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from mpkernels.ops import _tensor_table
from mpkernels.ops._registry import implement
from mpkernels.ops._tensor_table import BF16, BLOCK, FP16, FP32, head_mask, head_of, is_non_finite, load_span
from mpkernels.ops.grads.unscale import _unscale


@triton.jit
def unscaled(grad, factor):
    value = (grad.to(factor.dtype) * factor).to(grad.dtype)
    return value, is_non_finite(value.to(factor.dtype))


@triton.jit
def unscale_masked(grads, mask, factor):
    value, bad = unscaled(tl.load(grads, mask=mask), factor)
    tl.store(grads, value, mask=mask)
    return bad & mask


@triton.jit
def unscale_span(address, size, factor, T: tl.constexpr):
    head = head_of(address, T.primitive_bitwidth // 8)
    grads = tl.multiple_of((address + head * (T.primitive_bitwidth // 8)).to(tl.pointer_type(T)), 16)
    lanes = tl.arange(0, BLOCK)
    left = tl.maximum(size - head, 0)
    whole = left // (2 * BLOCK) * (2 * BLOCK)
    bad = tl.zeros([BLOCK], tl.int1)
    if head > 0:
        bad |= unscale_masked(grads - BLOCK + lanes, head_mask(lanes, head, size), factor)
    for begin in range(0, whole, 2 * BLOCK):
        one, other = tl.load(grads + begin + lanes), tl.load(grads + begin + BLOCK + lanes)
        one, bad_one = unscaled(one, factor)
        other, bad_other = unscaled(other, factor)
        tl.store(grads + begin + lanes, one)
        tl.store(grads + begin + BLOCK + lanes, other)
        bad |= bad_one | bad_other
    for begin in range(whole, left, BLOCK):
        bad |= unscale_masked(grads + begin + lanes, begin + lanes < left, factor)
    return tl.max(bad.to(tl.int32))


@triton.jit(do_not_specialize=["tensors"])
def unscale_kernel(rows, call, tensors, found_inf, inv_scale):
    _, _, address, size, dtype = load_span(rows, call, tensors, tl.program_id(0))
    factor = tl.load(inv_scale)
    if dtype == FP32:
        bad = unscale_span(address, size, factor, tl.float32)
    elif dtype == FP16:
        bad = unscale_span(address, size, factor, tl.float16)
    elif dtype == BF16:
        bad = unscale_span(address, size, factor, tl.bfloat16)
    else:
        bad = unscale_span(address, size, factor.to(tl.float64), tl.float64)
    if bad != 0:
        tl.store(found_inf, 1.0)  # benign race: every writer stores 1


@implement(_unscale)
def unscale_triton(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    if not grads:
        return
    flat = [grad if _tensor_table.is_dense(grad) else grad.contiguous() for grad in grads]
    rows, call, tensors, chunks = _tensor_table.build(flat, [grad.data_ptr() for grad in flat])
    unscale_kernel[(chunks,)](rows, call, tensors, found_inf, inv_scale, enable_fp_fusion=False)
    for grad, copy in zip(grads, flat, strict=True):
        if copy is not grad:
            grad.copy_(copy)
