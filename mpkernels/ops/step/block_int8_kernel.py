"""A step of a span whose states have 8 bits, in Triton."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator,assignment"

import triton
import triton.language as tl

from mpkernels.ops._bits_kernel import load_raw, pointers, widen
from mpkernels.ops.step import int8_kernel as int8
from mpkernels.ops.step.block_kernel import COUNT, are_aligned, load_weight, store_weight, weight_of
from mpkernels.ops.step.int8_kernel import QUANTIZED


@triton.jit
def load_codes(address, scales, at, mask, block, has_block):
    return tl.load(pointers(address, at, tl.int8, mask is None), mask=mask), tl.load(scales + block, mask=has_block)


@triton.jit
def store_codes(values, address, scales, at, mask, block, has_block, squared: tl.constexpr):
    codes, new_scales = int8.encode(values, mask, squared)
    tl.store(pointers(address, at, tl.int8, mask is None), codes, mask=mask)
    tl.store(scales + block, new_scales, mask=has_block)


@triton.jit
def step_int8_block(
    arrays, at, mask, block, blocks, scales, scalars, NEEDED: tl.constexpr, NOT_NEGATIVE: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """NOT_NEGATIVE: a bit for each state, which decides its code."""
    states_at = arrays.states
    has_block = None if mask is None else block < blocks
    optional = states_at[len(states_at) - 1] != 0
    words, halves, remainders = load_weight(arrays, at, mask)
    grad_words, grad_halves = load_raw(arrays.grad, arrays.grad_dtype, None, at, mask, mask is None)
    codes, states = (), ()
    state_codes, state_scales = tl.zeros(at.shape, tl.int8), tl.zeros(block.shape, tl.float32)  # of a missing state
    for i in tl.static_range(len(states_at)):
        if i < NEEDED:  # noqa: SIM114  a constant for Triton, unlike the next condition
            state_codes, state_scales = load_codes(states_at[i], scales + i * blocks, at, mask, block, has_block)
        elif optional:
            state_codes, state_scales = load_codes(states_at[i], scales + i * blocks, at, mask, block, has_block)
        codes += ((state_codes, state_scales),)
    factor, rule_scalars = scalars
    weight = weight_of(words, halves, remainders, arrays)
    grad = widen(grad_words, grad_halves, arrays.grad_dtype) * factor
    for i in tl.static_range(len(states_at)):
        states += (int8.decode(codes[i][0], codes[i][1], NOT_NEGATIVE >> i & 1),)
    weight, states = STEP(weight, grad, states, optional, rule_scalars)
    store_weight(weight, arrays, at, mask)  # first, to free its registers for codes
    for i in tl.static_range(len(states_at)):
        if i < NEEDED:  # noqa: SIM114  a constant for Triton, unlike the next condition
            store_codes(states[i], states_at[i], scales + i * blocks, at, mask, block, has_block, NOT_NEGATIVE >> i & 1)
        elif optional:
            store_codes(states[i], states_at[i], scales + i * blocks, at, mask, block, has_block, NOT_NEGATIVE >> i & 1)


@triton.jit
def step_int8(
    arrays, begin, size, elements, scales, scalars, WHOLE: tl.constexpr, NEEDED: tl.constexpr,
    NOT_NEGATIVE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Step WHOLE elements at once where the arrays are aligned. No head is peeled, because blocks of codes begin where
    the parameter does."""
    blocks, first = tl.cdiv(elements, QUANTIZED).to(tl.int32), (begin // QUANTIZED).to(tl.int32)
    whole = tl.where(are_aligned(arrays), size // WHOLE * WHOLE, 0)
    for i in range(0, whole, WHOLE):
        at, block = i + tl.arange(0, WHOLE), first + i // QUANTIZED + tl.arange(0, WHOLE // QUANTIZED)
        step_int8_block(arrays, at, None, block, blocks, scales, scalars, NEEDED, NOT_NEGATIVE, STEP)
    for i in range(whole, size, COUNT):
        at, block = i + tl.arange(0, COUNT), first + i // QUANTIZED + tl.arange(0, COUNT // QUANTIZED)
        step_int8_block(arrays, at, at < size, block, blocks, scales, scalars, NEEDED, NOT_NEGATIVE, STEP)
