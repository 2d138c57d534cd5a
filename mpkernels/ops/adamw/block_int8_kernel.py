"""adamw_'s step of a span whose moments have 8 bits, in Triton."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

import triton
import triton.language as tl

from mpkernels.ops._bits_kernel import load_raw, pointers, widen
from mpkernels.ops.adamw import int8_kernel as int8
from mpkernels.ops.adamw.block_kernel import COUNT, adamw, are_aligned, load_weight, store_weight, weight_of
from mpkernels.ops.adamw.int8_kernel import QUANTIZED


@triton.jit
def load_codes(address, scales, at, mask, block, has_block):
    return tl.load(pointers(address, at, tl.int8, mask is None), mask=mask), tl.load(scales + block, mask=has_block)


@triton.jit
def store_codes(values, address, scales, at, mask, block, has_block, squared: tl.constexpr):
    codes, new_scales = int8.encode(values, mask, squared)
    tl.store(pointers(address, at, tl.int8, mask is None), codes, mask=mask)
    tl.store(scales + block, new_scales, mask=has_block)


@triton.jit
def step_int8_block(arrays, at, mask, block, blocks, scales, scalars):
    _, grad_at, exp_avg_at, exp_avg_sq_at, largest_at, _, _, _, grad_dtype, _, _ = arrays
    amsgrad, has_block = largest_at != 0, None if mask is None else block < blocks
    words, halves, remainders = load_weight(arrays, at, mask)
    grad_words, grad_halves = load_raw(grad_at, grad_dtype, None, at, mask, mask is None)
    avg, avg_scales = load_codes(exp_avg_at, scales, at, mask, block, has_block)
    sq, sq_scales = load_codes(exp_avg_sq_at, scales + blocks, at, mask, block, has_block)
    most, most_scales = sq, sq_scales
    if amsgrad:
        most, most_scales = load_codes(largest_at, scales + 2 * blocks, at, mask, block, has_block)
    weight, exp_avg, exp_avg_sq, largest = adamw(
        weight_of(words, halves, remainders, arrays), widen(grad_words, grad_halves, grad_dtype),
        int8.decode(avg, avg_scales, False), int8.decode(sq, sq_scales, True), int8.decode(most, most_scales, True),
        amsgrad, scalars,
    )  # fmt: skip
    store_weight(weight, arrays, at, mask)  # first: its registers are free for codes
    store_codes(exp_avg, exp_avg_at, scales, at, mask, block, has_block, False)
    store_codes(exp_avg_sq, exp_avg_sq_at, scales + blocks, at, mask, block, has_block, True)
    if amsgrad:
        store_codes(largest, largest_at, scales + 2 * blocks, at, mask, block, has_block, True)


@triton.jit
def step_int8(arrays, begin, size, elements, scales, scalars, WHOLE: tl.constexpr):
    """WHOLE elements at once where the arrays are aligned. Blocks of codes begin where the parameter does: no head is
    peeled."""
    blocks, first = tl.cdiv(elements, QUANTIZED).to(tl.int32), (begin // QUANTIZED).to(tl.int32)
    whole = tl.where(are_aligned(arrays), size // WHOLE * WHOLE, 0)
    for i in range(0, whole, WHOLE):
        block = first + i // QUANTIZED + tl.arange(0, WHOLE // QUANTIZED)
        step_int8_block(arrays, i + tl.arange(0, WHOLE), None, block, blocks, scales, scalars)
    for i in range(whole, size, COUNT):
        at, block = i + tl.arange(0, COUNT), first + i // QUANTIZED + tl.arange(0, COUNT // QUANTIZED)
        step_int8_block(arrays, at, at < size, block, blocks, scales, scalars)
