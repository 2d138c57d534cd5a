"""A step of a span, in Triton: each block is loaded whole, then computed, then stored."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator,assignment"

from typing import Any, NamedTuple

import triton
import triton.language as tl

from mpkernels.ops._bits_kernel import both, load_raw, pointers, round_to_16, spread, store_raw, widen
from mpkernels.ops._tensor_table import AT_DTYPE, BLOCK, FP32, head_of, width_of
from mpkernels.ops.step import row_words_kernel as row_words
from mpkernels.ops.step.split_kernel import copied_master, join, split

COUNT = tl.constexpr(BLOCK.value // 2)  # elements of a block: registers hold all its arrays
MASKED = tl.constexpr(BLOCK.value // 8)  # elements of a masked or unaligned block: threads load one at a time


class Arrays(NamedTuple):
    """The addresses of a row's arrays, 0 for those that aren't there, and their dtypes' codes."""

    param: Any
    grad: Any
    states: Any  #: a tuple
    weight: Any  #: what the rule steps: the param itself or its fp32 copy
    remainder: Any
    dtype: Any  #: of the param
    grad_dtype: Any
    state_dtype: Any
    weight_dtype: Any


@triton.jit
def word(row, number: tl.constexpr, KNOWN: tl.constexpr):
    """Return a word of a row. If it is KNOWN to the compiler, loads that depend on it may be left out."""
    return tl.load(row + number) if KNOWN is None else tl.full([], KNOWN, tl.int64)


@triton.jit
def arrays_of(
    row, grad, DTYPE: tl.constexpr, GRAD_DTYPE: tl.constexpr, STATE_DTYPE: tl.constexpr, WEIGHT_DTYPE: tl.constexpr,
    HAS_OPTIONAL: tl.constexpr, HAS_REMAINDER: tl.constexpr, STATES: tl.constexpr, NEEDED: tl.constexpr,
):  # fmt: skip
    param, has_copies = tl.load(row + row_words.PARAM), DTYPE is None or WEIGHT_DTYPE is None or DTYPE != WEIGHT_DTYPE
    states = ()
    for i in tl.static_range(STATES):
        states += (word(row, row_words.STATES + i, None if i < NEEDED or HAS_OPTIONAL else 0),)
    return Arrays(
        param=param,
        grad=grad,
        states=states,
        weight=tl.load(row + row_words.WEIGHT) if has_copies else param,
        remainder=word(row, row_words.REMAINDER, None if HAS_REMAINDER else 0),
        dtype=word(row, AT_DTYPE, DTYPE),
        grad_dtype=word(row, row_words.GRAD_DTYPE, GRAD_DTYPE),
        state_dtype=word(row, row_words.STATE_DTYPE, STATE_DTYPE),
        weight_dtype=word(row, row_words.WEIGHT_DTYPE, WEIGHT_DTYPE),
    )


@triton.jit
def has_optional(states, at, NEEDED: tl.constexpr):
    """Tell, in each lane, whether the states that the rule can do without are there."""
    is_there = False
    if len(states) > NEEDED:
        is_there = spread(states[len(states) - 1], at) != 0
    return is_there


@triton.jit
def moved(arrays, count, NEEDED: tl.constexpr):
    """Return the arrays from a later element on."""
    state_bytes, states = count * width_of(arrays.state_dtype), ()
    for i in tl.static_range(len(arrays.states)):
        if i < NEEDED:
            states += (arrays.states[i] + state_bytes,)
        else:
            states += (tl.where(arrays.states[i] != 0, arrays.states[i] + state_bytes, 0),)
    return Arrays(
        param=arrays.param + count * width_of(arrays.dtype),
        grad=arrays.grad + count * width_of(arrays.grad_dtype),
        states=states,
        weight=arrays.weight + count * width_of(arrays.weight_dtype),
        remainder=tl.where(arrays.remainder != 0, arrays.remainder + count * 2, 0),
        dtype=arrays.dtype,
        grad_dtype=arrays.grad_dtype,
        state_dtype=arrays.state_dtype,
        weight_dtype=arrays.weight_dtype,
    )


@triton.jit
def are_aligned(arrays):
    joined = arrays.param | arrays.grad
    for i in tl.static_range(len(arrays.states)):
        joined |= arrays.states[i]
    return (joined | arrays.weight | arrays.remainder) % 16 == 0


@triton.jit
def load_weight(arrays, at, mask):
    """Return the bits of an fp32 weight or master, of a 16-bit weight, of its remainder: of each that is there."""
    aligned: tl.constexpr = mask is None
    param, weight, remainder = arrays.param, arrays.weight, arrays.remainder
    words = tl.load(pointers(weight, at, tl.int32, aligned), mask=both(mask, spread(arrays.weight_dtype, at) == FP32))
    halves = tl.load(pointers(param, at, tl.int16, aligned), mask=both(mask, spread(arrays.dtype, at) != FP32))
    remainders = tl.load(pointers(remainder, at, tl.int16, aligned), mask=both(mask, spread(remainder, at) != 0))
    return words, halves, remainders


@triton.jit
def weight_of(words, halves, remainders, arrays):
    if arrays.remainder != 0:
        weight = join(halves, remainders, arrays.dtype)
    elif arrays.weight != arrays.param:
        weight = copied_master(words.to(tl.float32, bitcast=True), halves, arrays.dtype)
    else:
        weight = widen(words, halves, arrays.dtype)
    return weight


@triton.jit
def store_weight(weight, arrays, at, mask):
    aligned: tl.constexpr = mask is None
    if arrays.remainder != 0:
        halves, remainders = split(weight, arrays.dtype)
    else:
        halves = round_to_16(weight, arrays.dtype)
        remainders = halves
    words = weight.to(tl.int32, bitcast=True)
    param, at_weight, remainder = arrays.param, arrays.weight, arrays.remainder
    tl.store(
        pointers(at_weight, at, tl.int32, aligned), words, mask=both(mask, spread(arrays.weight_dtype, at) == FP32)
    )
    tl.store(pointers(param, at, tl.int16, aligned), halves, mask=both(mask, spread(arrays.dtype, at) != FP32))
    tl.store(pointers(remainder, at, tl.int16, aligned), remainders, mask=both(mask, spread(remainder, at) != 0))


@triton.jit
def step_block(arrays, at, mask, scalars, NEEDED: tl.constexpr, STEP: tl.constexpr):
    aligned: tl.constexpr = mask is None
    optional = has_optional(arrays.states, at, NEEDED)
    words, halves, remainders = load_weight(arrays, at, mask)
    grad_words, grad_halves = load_raw(arrays.grad, arrays.grad_dtype, None, at, mask, aligned)
    raw, states, dtype = (), (), arrays.state_dtype
    for i in tl.static_range(len(arrays.states)):
        raw += (load_raw(arrays.states[i], dtype, None if i < NEEDED else optional, at, mask, aligned),)
    factor, rule_scalars = scalars
    weight = weight_of(words, halves, remainders, arrays)
    grad = widen(grad_words, grad_halves, arrays.grad_dtype) * factor
    for i in tl.static_range(len(arrays.states)):
        states += (widen(raw[i][0], raw[i][1], dtype),)
    weight, states = STEP(weight, grad, states, optional, rule_scalars)
    for i in tl.static_range(len(arrays.states)):
        store_raw(states[i], arrays.states[i], dtype, None if i < NEEDED else optional, at, mask, aligned)
    store_weight(weight, arrays, at, mask)


@triton.jit
def step_fp64_block(arrays, at, mask, scalars, NEEDED: tl.constexpr, STEP: tl.constexpr):
    """All arrays are fp64."""
    aligned: tl.constexpr = mask is None
    optional = has_optional(arrays.states, at, NEEDED)
    weight = tl.load(pointers(arrays.param, at, tl.float64, aligned), mask=mask)
    grad = tl.load(pointers(arrays.grad, at, tl.float64, aligned), mask=mask)
    states = ()
    for i in tl.static_range(len(arrays.states)):
        there = mask if i < NEEDED else both(mask, optional)
        states += (tl.load(pointers(arrays.states[i], at, tl.float64, aligned), mask=there),)
    factor, rule_scalars = scalars
    weight, states = STEP(weight, grad * factor, states, optional, rule_scalars)
    tl.store(pointers(arrays.param, at, tl.float64, aligned), weight, mask=mask)
    for i in tl.static_range(len(arrays.states)):
        there = mask if i < NEEDED else both(mask, optional)
        tl.store(pointers(arrays.states[i], at, tl.float64, aligned), states[i], mask=there)


@triton.jit
def step_any_block(arrays, at, mask, scalars, IS_FP64: tl.constexpr, NEEDED: tl.constexpr, STEP: tl.constexpr):
    if IS_FP64:
        step_fp64_block(arrays, at, mask, scalars, NEEDED, STEP)
    else:
        step_block(arrays, at, mask, scalars, NEEDED, STEP)


@triton.jit
def step_span(arrays, size, scalars, IS_FP64: tl.constexpr, NEEDED: tl.constexpr, STEP: tl.constexpr):
    count: tl.constexpr = MASKED if IS_FP64 else COUNT  # two fp64 elements per thread spill under Triton 3.6
    head = tl.minimum(head_of(arrays.param, width_of(arrays.dtype)), size)
    after_head = moved(arrays, head, NEEDED)
    whole = tl.where(are_aligned(after_head), (size - head) // count * count, 0)
    for i in range(0, whole, count):
        step_any_block(after_head, i + tl.arange(0, count), None, scalars, IS_FP64, NEEDED, STEP)
    done = head + whole
    for block in range(tl.where(head > 0, -1, 0), tl.cdiv(size - done, MASKED)):
        at = tl.where(block < 0, 0, done + block * MASKED) + tl.arange(0, MASKED)
        mask = at < tl.where(block < 0, head, size)
        step_any_block(arrays, at, mask, scalars, IS_FP64, NEEDED, STEP)
