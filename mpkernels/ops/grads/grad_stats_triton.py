"""grad_stats in Triton: one program per chunk. The last program of a tensor adds up its chunks, the last of all tensors
their sums."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpkernels.ops import _tensor_table
from mpkernels.ops._registry import implement
from mpkernels.ops._tensor_table import (
    AT_FIRST_CHUNK,
    BF16,
    BLOCK,
    FP16,
    FP32,
    chunks_of,
    is_last_one_out,
    is_non_finite,
    load_span,
)
from mpkernels.ops.grads import grad_stats
from mpkernels.ops.grads.grad_stats import LEAST, MOST, _grad_stats

PACK = tl.constexpr(grad_stats.PACK)
PACKS = tl.constexpr(128)  # in a block
LEAST_SUM, MOST_SUM = tl.constexpr(LEAST), tl.constexpr(MOST)


@triton.jit
def stats_of_span(address, size, T: tl.constexpr, IS_BF16: tl.constexpr):
    """Return a span's sum of squares, and 1 if it holds an inf or NaN. Each lane adds up every PACKSth pack, in order.
    If fp32 has lost something, careful_sums adds up all packs."""
    grads = address.to(tl.pointer_type(T))
    sumsq = tl.zeros([PACKS], tl.float64)
    lost = tl.zeros([PACKS], tl.int1)
    whole = tl.where(address % 16 == 0, size // (4 * BLOCK) * (4 * BLOCK), 0)
    for begin in range(0, whole, 4 * BLOCK):
        at = tl.multiple_of(grads + begin, 16)
        first, second = load_packs(at, T), load_packs(at + BLOCK, T)
        third, fourth = load_packs(at + 2 * BLOCK, T), load_packs(at + 3 * BLOCK, T)
        sumsq, lost = add(first, sumsq, lost, IS_BF16)
        sumsq, lost = add(second, sumsq, lost, IS_BF16)
        sumsq, lost = add(third, sumsq, lost, IS_BF16)
        sumsq, lost = add(fourth, sumsq, lost, IS_BF16)
    for begin in range(whole, size, BLOCK):
        sumsq, lost = add(load_some_packs(grads, begin, size, T), sumsq, lost, IS_BF16)
    if tl.max(lost.to(tl.int32)) != 0:
        sumsq = tl.zeros([PACKS], tl.float64)
        for begin in range(0, size, BLOCK):
            sumsq += careful_sums(load_some_packs(grads, begin, size, T), IS_BF16)
    total = tl.sum(sumsq)
    return total, is_non_finite(total).to(tl.float64)


@triton.jit
def stats_of_fp64(address, size):
    grads = address.to(tl.pointer_type(tl.float64))
    sumsq = tl.zeros([PACKS], tl.float64)
    bad = tl.zeros([PACKS], tl.int1)
    for begin in range(0, size, BLOCK):
        for part in tl.static_range(PACK // 2):
            at = begin + tl.arange(0, PACKS)[:, None] * PACK + 2 * part + tl.arange(0, 2)[None, :]
            first, second = tl.split(tl.load(grads + at, mask=at < size, other=0))
            bad |= is_non_finite(first) | is_non_finite(second)
            pair = first * first + second * second
            if part == 0:
                sums = pair
            elif part == 1:
                sums += pair
            elif part == 2:
                last = pair
            else:
                sumsq += sums + (last + pair)
    return tl.sum(sumsq), tl.max(bad.to(tl.int32)).to(tl.float64)


@triton.jit
def places(begin, width: tl.constexpr):
    return begin + tl.arange(0, PACKS)[:, None] * PACK + tl.arange(0, width)[None, :]


@triton.jit
def load_packs(grads, T: tl.constexpr):
    """Load a block's packs, 16 bytes at a time: fp32 packs in two halves, 16-bit packs whole, returned twice."""
    width: tl.constexpr = 128 // T.primitive_bitwidth
    first = tl.load(grads + places(0, width))
    second = first
    if width < PACK:
        second = tl.load(grads + places(width, width))
    return first, second


@triton.jit
def load_some_packs(grads, begin, size, T: tl.constexpr):
    """As load_packs, from any address, with 0 for elements beyond the span."""
    width: tl.constexpr = 128 // T.primitive_bitwidth
    at = places(begin, width)
    first = tl.load(grads + at, mask=at < size, other=0)
    second = first
    if width < PACK:
        second = tl.load(grads + at + width, mask=at + width < size, other=0)
    return first, second


@triton.jit
def widen(x, IS_BF16: tl.constexpr):
    """Return fp32. bf16 comes as integers, because older chips have no bf16."""
    return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True) if IS_BF16 else x.to(tl.float32)


@triton.jit
def neighbours(x):
    """Return the first and the second of each two neighbours in a row."""
    return tl.split(tl.reshape(x, [PACKS, x.shape[1] // 2, 2]))


@triton.jit
def sums_of_rows(x):
    for _ in tl.static_range(3):
        if x.shape[1] > 1:
            first, second = neighbours(x)
            x = first + second
    return tl.reshape(x, [PACKS])


@triton.jit
def sums_of_squares(packs, C: tl.constexpr, IS_BF16: tl.constexpr):
    first, second = widen(packs[0], IS_BF16).to(C), widen(packs[1], IS_BF16).to(C)
    sums = sums_of_rows(first * first)
    if first.shape[1] < PACK:
        sums += sums_of_rows(second * second)
    return sums


@triton.jit
def is_beyond_fp32(sums):
    return ((sums >= LEAST_SUM) & (sums <= MOST_SUM)) == 0


@triton.jit
def bits_of_rows(x):
    for _ in tl.static_range(3):
        if x.shape[1] > 1:
            first, second = neighbours(x)
            x = first | second
    return tl.reshape(x, [PACKS])


@triton.jit
def are_zero(packs, IS_BF16: tl.constexpr):
    """Return which packs hold nothing but 0 and -0."""
    bits = bits_of_rows(widen(packs[0], IS_BF16).to(tl.int32, bitcast=True))
    if packs[0].shape[1] < PACK:
        bits |= bits_of_rows(widen(packs[1], IS_BF16).to(tl.int32, bitcast=True))
    return (bits << 1) == 0


@triton.jit
def add(packs, sumsq, lost, IS_BF16: tl.constexpr):
    sums = sums_of_squares(packs, tl.float32, IS_BF16)
    return sumsq + sums.to(tl.float64), lost | (is_beyond_fp32(sums) & (are_zero(packs, IS_BF16) == 0))


@triton.jit
def careful_sums(packs, IS_BF16: tl.constexpr):
    narrow, wide = sums_of_squares(packs, tl.float32, IS_BF16), sums_of_squares(packs, tl.float64, IS_BF16)
    return tl.where(is_beyond_fp32(narrow), wide, narrow.to(tl.float64))


@triton.jit
def sum_of(values, count):
    """Return the sum of what other programs wrote, past the L1 cache."""
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    for begin in range(0, count, BLOCK):
        share = tl.load(values + begin + lanes, mask=begin + lanes < count, other=0, cache_modifier=".cg")
        total += share.to(tl.float64)
    return tl.sum(total)


@triton.jit(do_not_specialize=["tensors", "chunks"])
def grad_stats_kernel(rows, call, tensors, chunks, sumsq, nonfinite, total_sumsq, found_inf, chunk_sums):
    chunk = tl.program_id(0)
    tensor, row, address, size, dtype = load_span(rows, call, tensors, chunk)
    if dtype == FP32:
        share, bad = stats_of_span(address, size, tl.float32, False)
    elif dtype == FP16:
        share, bad = stats_of_span(address, size, tl.float16, False)
    elif dtype == BF16:
        share, bad = stats_of_span(address, size, tl.int16, True)
    else:
        share, bad = stats_of_fp64(address, size)
    chunk_bad = chunk_sums + chunks
    tl.store(chunk_sums + chunk, share)
    tl.store(chunk_bad + chunk, bad)

    first, count = tl.load(row + AT_FIRST_CHUNK), chunks_of(row)
    tickets = call + tensors
    if is_last_one_out(tickets + tensor, count):
        tl.store(sumsq + tensor, sum_of(chunk_sums + first, count))
        tl.store(nonfinite + tensor, tl.where(sum_of(chunk_bad + first, count) > 0, 1.0, 0.0))
        if is_last_one_out(tickets + tensors, tensors):
            tl.store(total_sumsq, sum_of(sumsq, tensors))
            tl.store(found_inf, tl.where(sum_of(nonfinite, tensors) > 0, 1.0, 0.0))


@implement(_grad_stats)
def grad_stats_triton(grads: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    flat = [grad if _tensor_table.is_dense(grad) else grad.contiguous() for grad in grads]
    table = _tensor_table.build(flat, [grad.data_ptr() for grad in flat])
    sumsq, chunk_sums = (
        torch.empty(size, dtype=torch.float64, device=table.rows.device) for size in (table.tensors, 2 * table.chunks)
    )
    nonfinite = torch.empty(table.tensors, dtype=torch.float32, device=table.rows.device)
    results = sumsq, nonfinite, sumsq.new_empty(()), nonfinite.new_empty(())
    grad_stats_kernel[(table.chunks,)](*table, *results, chunk_sums, enable_fp_fusion=False)
    return results
