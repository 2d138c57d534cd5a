"""Blocks of elements, loaded as bits first and widened after, whatever their dtypes."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

import triton
import triton.language as tl

from mpkernels.ops._tensor_table import BF16, FP32


@triton.jit
def pointers(address, at, T: tl.constexpr, ALIGNED: tl.constexpr):
    array = address.to(tl.pointer_type(T))
    if ALIGNED:
        array = tl.multiple_of(array, 16)
    return array + at


@triton.jit
def both(a, b):
    """Return a & b; None means all lanes."""
    return b if a is None else a & b


@triton.jit
def spread(value, at):
    """Return a scalar in each lane, because Triton's interpreter makes masks only of lanes."""
    return value + tl.zeros_like(at)


@triton.jit
def load_raw(address, dtype, is_there, at, mask, ALIGNED: tl.constexpr):
    """Load the bits of a block in fp32 or 16 bits, without a branch, so that loads of many arrays overlap."""
    dtypes = spread(dtype, at)
    words = tl.load(pointers(address, at, tl.int32, ALIGNED), mask=both(mask, both(is_there, dtypes == FP32)))
    halves = tl.load(pointers(address, at, tl.int16, ALIGNED), mask=both(mask, both(is_there, dtypes != FP32)))
    return words, halves


@triton.jit
def widen(words, halves, dtype):
    """Return in fp32 what load_raw loaded."""
    from_bf16 = (halves.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    from_16 = tl.where(dtype == BF16, from_bf16, halves.to(tl.float16, bitcast=True).to(tl.float32))
    return tl.where(dtype == FP32, words.to(tl.float32, bitcast=True), from_16)


@triton.jit
def round_to_16(values, dtype):
    as_fp16 = values.to(tl.float16).to(tl.int16, bitcast=True)
    return tl.where(dtype == BF16, values.to(tl.bfloat16).to(tl.int16, bitcast=True), as_fp16)


@triton.jit
def store_raw(values, address, dtype, is_there, at, mask, ALIGNED: tl.constexpr):
    """Store fp32 in a block's dtype, fp32 or 16 bits."""
    dtypes = spread(dtype, at)
    words, halves = values.to(tl.int32, bitcast=True), round_to_16(values, dtype)
    tl.store(pointers(address, at, tl.int32, ALIGNED), words, mask=both(mask, both(is_there, dtypes == FP32)))
    tl.store(pointers(address, at, tl.int16, ALIGNED), halves, mask=both(mask, both(is_there, dtypes != FP32)))
