"""csrc/step/split.h in Triton: a master as a 16-bit weight and a remainder, and back; or as a copy."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

import triton
import triton.language as tl

from mpkernels.ops._tensor_table import BF16

NEAREST = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds a float to an integer, in the low bits
NEAREST_BITS = tl.constexpr(0x4B400000)


@triton.jit
def unit_of_fp16(bits):
    """Return a 2^-16th of the last place, as the bits of an fp32."""
    return (tl.maximum(bits >> 10 & 0x1F, 1) + 86) << 23


@triton.jit
def join(weight, remainder, dtype):
    weight, remainder = weight.to(tl.int32), remainder.to(tl.int32)
    if dtype == BF16:
        alone = weight << 16
        nearest = (alone + remainder).to(tl.float32, bitcast=True)
        master = tl.where(nearest != nearest, alone.to(tl.float32, bitcast=True), nearest)  # a NaN beyond 0 or inf
    else:
        magnitude = (weight & 0x7FFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        beyond = remainder.to(tl.float32) * unit_of_fp16(weight).to(tl.float32, bitcast=True)
        is_power = (magnitude > 0.00006103515625) & ((weight & 0x3FF) == 0)  # 2^-14
        is_anothers = ((magnitude + beyond) - magnitude != beyond) | (is_power & (remainder < -16384))
        joined = tl.where(is_anothers, magnitude, magnitude + beyond)
        joined = tl.where(joined < 0, 0.0, joined).to(tl.int32, bitcast=True)
        master = (joined | weight & -0x80000000).to(tl.float32, bitcast=True)
    return master


@triton.jit
def units_beyond(weight, magnitude):
    units_in_one = ((254 << 23) - unit_of_fp16(weight)).to(tl.float32, bitcast=True)
    return (magnitude - weight.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)) * units_in_one


@triton.jit
def split(master, dtype):
    bits = master.to(tl.int32, bitcast=True)
    if dtype == BF16:
        kept = tl.where(master != master, bits & -0x10000 | 0x400000, bits)  # a NaN would round to inf
        weight, remainder = (kept + 0x8000) >> 16, kept
    else:
        magnitude = tl.abs(master)
        nearest = magnitude.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        weight = tl.where(units_beyond(nearest, magnitude) >= 32768, nearest + 1, nearest)
        rounded = (units_beyond(weight, magnitude) + NEAREST).to(tl.int32, bitcast=True) - NEAREST_BITS
        remainder = tl.where((weight & 0x7C00) == 0x7C00, 0, tl.minimum(rounded, 32767))
        weight |= bits >> 16 & 0x8000
    return weight.to(tl.int16), remainder.to(tl.int16)


@triton.jit
def copied_master(copy, weight, dtype):
    if dtype == BF16:
        rounded = copy.to(tl.bfloat16).to(tl.int16, bitcast=True)
        written = weight.to(tl.bfloat16, bitcast=True).to(tl.float32)
    else:
        rounded = copy.to(tl.float16).to(tl.int16, bitcast=True)
        written = weight.to(tl.float16, bitcast=True).to(tl.float32)
    return tl.where(rounded == weight, copy, written)
