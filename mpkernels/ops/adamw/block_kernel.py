"""adamw_'s step of a span, in Triton: of each block all is loaded, then computed, then stored."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

import triton
import triton.language as tl

from mpkernels.ops._bits_kernel import both, load_raw, pointers, round_to_16, spread, store_raw, widen
from mpkernels.ops._table import BLOCK, FP32, head_of, width_of
from mpkernels.ops.adamw.split_kernel import copied_master, join, split

COUNT = tl.constexpr(BLOCK.value // 2)  # elements of a block: registers hold all its arrays
MASKED = tl.constexpr(BLOCK.value // 8)  # where a mask or an odd address lets a thread load one element at a time


@triton.jit
def adamw(weight, grad, exp_avg, exp_avg_sq, largest, amsgrad, scalars):
    factor, decay, weight1, beta2, weight2, step_size, eps = scalars
    grad *= factor
    weight *= decay
    exp_avg += (grad - exp_avg) * weight1
    exp_avg_sq = exp_avg_sq * beta2 + grad * weight2 * grad
    larger = tl.where((largest != largest) | (largest > exp_avg_sq), largest, exp_avg_sq)
    largest = tl.where(amsgrad, larger, exp_avg_sq)
    if grad.dtype.is_fp64():
        weight -= step_size * exp_avg / (tl.sqrt(largest) + eps)
    else:
        weight -= tl.div_rn(step_size * exp_avg, tl.sqrt_rn(largest) + eps)
    return weight, exp_avg, exp_avg_sq, largest


@triton.jit
def word(row, number: tl.constexpr, KNOWN: tl.constexpr):
    """Return a word of a row. If it is known to the compiler, so is what follows from it: loads that never happen."""
    return tl.load(row + number) if KNOWN is None else tl.full([], KNOWN, tl.int64)


@triton.jit
def arrays_of(
    row, grad, DTYPE: tl.constexpr, GRAD_DTYPE: tl.constexpr, STATE_DTYPE: tl.constexpr, WEIGHT_DTYPE: tl.constexpr,
    HAS_LARGEST: tl.constexpr, HAS_REMAINDER: tl.constexpr,
):  # fmt: skip
    """Return the addresses of seven arrays, 0 for those that aren't there, and four dtypes."""
    param, has_copies = tl.load(row + 4), DTYPE is None or WEIGHT_DTYPE is None or DTYPE != WEIGHT_DTYPE
    return (
        param, grad, tl.load(row + 5), tl.load(row + 6), word(row, 7, None if HAS_LARGEST else 0),
        tl.load(row + 8) if has_copies else param, word(row, 9, None if HAS_REMAINDER else 0),
        word(row, 3, DTYPE), word(row, 11, GRAD_DTYPE), word(row, 12, STATE_DTYPE), word(row, 13, WEIGHT_DTYPE),
    )  # fmt: skip


@triton.jit
def moved(arrays, count):
    """Return the arrays from a later element on."""
    param, grad, exp_avg, exp_avg_sq, largest, weight, remainder, dtype, grad_dtype, state_dtype, weight_dtype = arrays
    of_state = count * width_of(state_dtype)
    return (
        param + count * width_of(dtype), grad + count * width_of(grad_dtype), exp_avg + of_state, exp_avg_sq + of_state,
        tl.where(largest != 0, largest + of_state, 0), weight + count * width_of(weight_dtype),
        tl.where(remainder != 0, remainder + count * 2, 0), dtype, grad_dtype, state_dtype, weight_dtype,
    )  # fmt: skip


@triton.jit
def are_aligned(arrays):
    param, grad, exp_avg, exp_avg_sq, largest, weight, remainder, _, _, _, _ = arrays
    return (param | grad | exp_avg | exp_avg_sq | largest | weight | remainder) % 16 == 0


@triton.jit
def load_weight(arrays, at, mask):
    """Return the bits of an fp32 weight or master, of a 16-bit weight, of its remainder: of each that is there."""
    param, _, _, _, _, weight, remainder, dtype, _, _, weight_dtype = arrays
    aligned: tl.constexpr = mask is None
    words = tl.load(pointers(weight, at, tl.int32, aligned), mask=both(mask, spread(weight_dtype, at) == FP32))
    halves = tl.load(pointers(param, at, tl.int16, aligned), mask=both(mask, spread(dtype, at) != FP32))
    remainders = tl.load(pointers(remainder, at, tl.int16, aligned), mask=both(mask, spread(remainder, at) != 0))
    return words, halves, remainders


@triton.jit
def weight_of(words, halves, remainders, arrays):
    param, _, _, _, _, weight_at, remainder, dtype, _, _, _ = arrays
    if remainder != 0:
        weight = join(halves, remainders, dtype)
    elif weight_at != param:
        weight = copied_master(words.to(tl.float32, bitcast=True), halves, dtype)
    else:
        weight = widen(words, halves, dtype)
    return weight


@triton.jit
def store_weight(weight, arrays, at, mask):
    param, _, _, _, _, weight_at, remainder, dtype, _, _, weight_dtype = arrays
    aligned: tl.constexpr = mask is None
    if remainder != 0:
        halves, remainders = split(weight, dtype)
    else:
        halves = round_to_16(weight, dtype)
        remainders = halves
    words = weight.to(tl.int32, bitcast=True)
    tl.store(pointers(weight_at, at, tl.int32, aligned), words, mask=both(mask, spread(weight_dtype, at) == FP32))
    tl.store(pointers(param, at, tl.int16, aligned), halves, mask=both(mask, spread(dtype, at) != FP32))
    tl.store(pointers(remainder, at, tl.int16, aligned), remainders, mask=both(mask, spread(remainder, at) != 0))


@triton.jit
def step_block(arrays, at, mask, scalars):
    _, grad_at, exp_avg_at, exp_avg_sq_at, largest_at, _, _, _, grad_dtype, dtype, _ = arrays
    aligned: tl.constexpr = mask is None
    amsgrad = spread(largest_at, at) != 0
    words, halves, remainders = load_weight(arrays, at, mask)
    grad_words, grad_halves = load_raw(grad_at, grad_dtype, None, at, mask, aligned)
    avg_words, avg_halves = load_raw(exp_avg_at, dtype, None, at, mask, aligned)
    sq_words, sq_halves = load_raw(exp_avg_sq_at, dtype, None, at, mask, aligned)
    largest_words, largest_halves = load_raw(largest_at, dtype, amsgrad, at, mask, aligned)
    weight, exp_avg, exp_avg_sq, largest = adamw(
        weight_of(words, halves, remainders, arrays), widen(grad_words, grad_halves, grad_dtype),
        widen(avg_words, avg_halves, dtype), widen(sq_words, sq_halves, dtype),
        widen(largest_words, largest_halves, dtype), amsgrad, scalars,
    )  # fmt: skip
    store_raw(exp_avg, exp_avg_at, dtype, None, at, mask, aligned)
    store_raw(exp_avg_sq, exp_avg_sq_at, dtype, None, at, mask, aligned)
    store_raw(largest, largest_at, dtype, amsgrad, at, mask, aligned)
    store_weight(weight, arrays, at, mask)


@triton.jit
def step_fp64_block(arrays, at, mask, scalars):
    """All arrays are fp64."""
    param, grad_at, exp_avg_at, exp_avg_sq_at, largest_at, _, _, _, _, _, _ = arrays
    aligned: tl.constexpr = mask is None
    amsgrad = spread(largest_at, at) != 0
    weight = tl.load(pointers(param, at, tl.float64, aligned), mask=mask)
    grad = tl.load(pointers(grad_at, at, tl.float64, aligned), mask=mask)
    exp_avg = tl.load(pointers(exp_avg_at, at, tl.float64, aligned), mask=mask)
    exp_avg_sq = tl.load(pointers(exp_avg_sq_at, at, tl.float64, aligned), mask=mask)
    largest = tl.load(pointers(largest_at, at, tl.float64, aligned), mask=both(mask, amsgrad))
    weight, exp_avg, exp_avg_sq, largest = adamw(weight, grad, exp_avg, exp_avg_sq, largest, amsgrad, scalars)
    tl.store(pointers(param, at, tl.float64, aligned), weight, mask=mask)
    tl.store(pointers(exp_avg_at, at, tl.float64, aligned), exp_avg, mask=mask)
    tl.store(pointers(exp_avg_sq_at, at, tl.float64, aligned), exp_avg_sq, mask=mask)
    tl.store(pointers(largest_at, at, tl.float64, aligned), largest, mask=both(mask, amsgrad))


@triton.jit
def step_span(arrays, size, scalars, IS_FP64: tl.constexpr):
    count: tl.constexpr = MASKED if IS_FP64 else COUNT  # of fp64 two a thread spill under Triton 3.6
    head = tl.minimum(head_of(arrays[0], width_of(arrays[7])), size)
    after_head = moved(arrays, head)
    whole = tl.where(are_aligned(after_head), (size - head) // count * count, 0)
    for i in range(0, whole, count):
        if IS_FP64:
            step_fp64_block(after_head, i + tl.arange(0, count), None, scalars)
        else:
            step_block(after_head, i + tl.arange(0, count), None, scalars)
    done = head + whole
    for block in range(tl.where(head > 0, -1, 0), tl.cdiv(size - done, MASKED)):
        at = tl.where(block < 0, 0, done + block * MASKED) + tl.arange(0, MASKED)
        mask = at < tl.where(block < 0, head, size)
        if IS_FP64:
            step_fp64_block(arrays, at, mask, scalars)
        else:
            step_block(arrays, at, mask, scalars)
