"""csrc/step/int8.h in Triton: moments as 8-bit codes with a scale for each QUANTIZED of them, and back."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

import triton
import triton.language as tl

from mpkernels.ops.step import int8
from mpkernels.ops.step.split_kernel import NEAREST

QUANTIZED = tl.constexpr(int8.QUANTIZED)
SMALLEST_SCALE = tl.constexpr(int8.SMALLEST_SCALE)


@triton.jit
def in_blocks(values):
    return tl.reshape(values, [values.shape[0] // QUANTIZED, QUANTIZED])


@triton.jit
def decode(codes, scales, squared: tl.constexpr):
    """Return the fp32 values of whole blocks of codes, with a scale for each block."""
    q = in_blocks(codes.to(tl.float32) + (128 if squared else 0))
    root = q * (1 / (255 if squared else 127))
    values = scales[:, None] * (root * tl.abs(root))
    if squared:
        values *= values
    return tl.reshape(values, codes.shape)


@triton.jit
def encode(values, mask, squared: tl.constexpr):
    """Return the codes and the scales of whole blocks; what is masked off counts as 0."""
    numbers = values if mask is None else tl.where(mask, values, 0.0)
    if squared:
        numbers = tl.sqrt_rn(numbers)
    numbers = in_blocks(numbers)
    bits = numbers.to(tl.int32, bitcast=True)
    magnitudes = bits & 0x7FFFFFFF  # as integers, by which NaN comes after inf, and inf after all numbers
    largest = tl.max(magnitudes, 1).to(tl.float32, bitcast=True)
    scales = tl.where(largest < SMALLEST_SCALE, 0.0, largest)
    inverse = tl.where(scales == 0, 0.0, tl.div_rn(1.0, tl.where(scales == 0, 1.0, scales)))
    roots = tl.sqrt_rn(magnitudes.to(tl.float32, bitcast=True) * inverse[:, None])
    if squared:
        steps = tl.where(numbers > 0, tl.maximum(roots * 255, 1.0), 0.0)
    else:
        steps = tl.maximum(roots * 127, 0.0)  # NaN becomes 0
        steps = (steps.to(tl.int32, bitcast=True) | (bits & -0x80000000)).to(tl.float32, bitcast=True)
    codes = (steps + (NEAREST - 128 if squared else NEAREST)).to(tl.int32, bitcast=True)  # a code is the last byte
    return tl.reshape(codes, values.shape).to(tl.int8), scales
