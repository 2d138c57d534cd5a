"""unscale_ in Triton: one program a chunk."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from mpkernels.ops import _table
from mpkernels.ops._registry import implement
from mpkernels.ops._table import BF16, BLOCK, FP16, FP32, is_non_finite, load_span, whole_blocks
from mpkernels.ops.grads.unscale import _unscale


@triton.jit
def unscale_block(grads, mask, factor):
    grad = tl.load(grads, mask=mask)
    value = (grad.to(factor.dtype) * factor).to(grad.dtype)
    tl.store(grads, value, mask=mask)
    bad = is_non_finite(value.to(factor.dtype))
    return tl.max(bad.to(tl.int32) if mask is None else (bad & mask).to(tl.int32))


@triton.jit
def unscale_span(address, size, factor, T: tl.constexpr):
    whole = whole_blocks(address, size)
    lanes = tl.arange(0, BLOCK)
    aligned = tl.multiple_of(address.to(tl.pointer_type(T)), 16)
    bad = tl.max(tl.zeros([BLOCK], tl.int32))
    for begin in range(0, whole, BLOCK):
        bad |= unscale_block(aligned + begin + lanes, None, factor)
    grads = address.to(tl.pointer_type(T))
    for begin in range(whole, size, BLOCK):
        bad |= unscale_block(grads + begin + lanes, begin + lanes < size, factor)
    return bad


@triton.jit(do_not_specialize=["tensors"])
def unscale_kernel(words, tensors, found_inf, inv_scale, CHUNK: tl.constexpr):
    _, address, size, dtype = load_span(words, tensors, tl.program_id(0), CHUNK)
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
    flat = [grad if _table.is_dense(grad) else grad.contiguous() for grad in grads]
    table = _table.build(flat)
    unscale_kernel[(table.chunks,)](
        table.words, table.tensors, found_inf, inv_scale, CHUNK=_table.CHUNK, enable_fp_fusion=False
    )
    for grad, copy in zip(grads, flat, strict=True):
        if copy is not grad:
            grad.copy_(copy)
