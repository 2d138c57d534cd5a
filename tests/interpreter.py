"""Triton's interpreter, mended. It cuts fp32 off to bf16, where every chip rounds to nearest even; and it gives a 0 to
lanes that are masked off, where a chip gives them anything."""

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def to_fp32(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bf16(values):
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), bits >> 16 | 0x40, rounded).astype(np.uint16)


def round_bf16_as_hardware_does():
    theirs = interpreter.InterpreterBuilder.cast_impl

    def cast_impl(self, src, dst_type):
        cast = {(tl.bfloat16, tl.float32): to_fp32, (tl.float32, tl.bfloat16): to_bf16}.get(
            (src.dtype.scalar, dst_type.scalar)
        )
        return interpreter.TensorHandle(cast(src.data), dst_type.scalar) if cast else theirs(self, src, dst_type)

    interpreter.InterpreterBuilder.cast_impl = cast_impl


def poison_lanes_masked_off():
    theirs = interpreter.InterpreterBuilder.create_masked_load

    def create_masked_load(self, ptrs, mask, other, *hints, **named_hints):
        if other is None:
            dtype = np.dtype(interpreter._get_np_dtype(ptrs.get_element_ty()))
            ones = np.full(ptrs.data.shape, -1, f"i{dtype.itemsize}")  # in every bit: NaN in every format
            other = interpreter.TensorHandle(ones.view(dtype), ptrs.get_element_ty())
        return theirs(self, ptrs, mask, other, *hints, **named_hints)

    interpreter.InterpreterBuilder.create_masked_load = create_masked_load
