"""A Triton program's part of the report on a skipped step's grads; csrc/grads/overflow_block.h has it in CUDA C++."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

import triton
import triton.language as tl

from mpkernels.ops._bits_kernel import load_raw, pointers, widen
from mpkernels.ops._tensor_table import AT_FIRST_CHUNK, AT_SIZE, BLOCK, FP64, chunks_of, is_last_one_out
from mpkernels.ops.grads import overflow

FIELDS = tl.constexpr(len(overflow.FIELDS))
INFINITY = tl.constexpr(float("inf"))
NOWHERE = tl.constexpr(2**31 - 1)


@triton.jit
def count_span(line, dtype, address, begin, size, compute: tl.constexpr):
    """Store a chunk's line of the report: the five fields after its size."""
    lanes = tl.arange(0, BLOCK // 2)
    infs = tl.zeros([BLOCK // 2], tl.int32)
    nans = tl.zeros([BLOCK // 2], tl.int32)
    zeros = tl.zeros([BLOCK // 2], tl.int32)
    first = tl.full([BLOCK // 2], NOWHERE, tl.int32)
    largest = tl.zeros([BLOCK // 2], compute)
    for i in range(0, size, BLOCK // 2):
        mask = i + lanes < size
        if compute == tl.float64:
            x = tl.load(pointers(address, begin + i + lanes, tl.float64, False), mask=mask)
        else:
            words, halves = load_raw(address, dtype, None, begin + i + lanes, mask, False)
            x = widen(words, halves, dtype)
        magnitude = tl.abs(x)
        inf, nan = mask & (magnitude == INFINITY), mask & (x != x)
        infs += inf.to(tl.int32)
        nans += nan.to(tl.int32)
        zeros += (mask & (magnitude == 0)).to(tl.int32)
        first = tl.where(inf | nan, tl.minimum(first, i + lanes), first)
        is_larger = mask & (magnitude < INFINITY) & (magnitude > largest)
        largest = tl.where(is_larger, magnitude, largest)
    tl.store(line + 1, tl.sum(infs).to(tl.float64))
    tl.store(line + 2, tl.sum(nans).to(tl.float64))
    at = tl.min(first)
    tl.store(line + 3, tl.where(at == NOWHERE, INFINITY, (begin + at).to(tl.float64)))
    tl.store(line + 4, tl.max(largest).to(tl.float64))
    tl.store(line + 5, tl.sum(zeros).to(tl.float64))


@triton.jit
def load_field(chunk_lines, field: tl.constexpr, i, count, other):
    """Load a field of chunks that other programs wrote, past the L1 cache."""
    return tl.load(chunk_lines + i * FIELDS + field, mask=i < count, other=other, cache_modifier=".cg")


@triton.jit
def write_line(line, chunk_lines, count, size):
    lanes = tl.arange(0, 128)
    infs = tl.zeros([128], tl.float64)
    nans = tl.zeros([128], tl.float64)
    zeros = tl.zeros([128], tl.float64)
    first = tl.full([128], INFINITY, tl.float64)
    largest = tl.zeros([128], tl.float64)
    for begin in range(0, count, 128):
        i = begin + lanes
        infs += load_field(chunk_lines, 1, i, count, 0.0)
        nans += load_field(chunk_lines, 2, i, count, 0.0)
        first = tl.minimum(first, load_field(chunk_lines, 3, i, count, INFINITY))
        largest = tl.maximum(largest, load_field(chunk_lines, 4, i, count, 0.0))
        zeros += load_field(chunk_lines, 5, i, count, 0.0)
    tl.store(line, size.to(tl.float64))
    tl.store(line + 1, tl.sum(infs))
    tl.store(line + 2, tl.sum(nans))
    tl.store(line + 3, tl.min(first))
    tl.store(line + 4, tl.max(largest))
    tl.store(line + 5, tl.sum(zeros))


@triton.jit
def write_heading(report, scale, unscaled: tl.constexpr):
    loss_scale, on_grads = 0.0, 1.0
    if scale is not None:
        loss_scale = tl.load(scale).to(tl.float64)
        if not unscaled:
            on_grads = loss_scale
    tl.store(report, 1.0)
    tl.store(report + 1, loss_scale)
    tl.store(report + 2, on_grads)
    for field in tl.static_range(3, 6):
        tl.store(report + field, 0.0)


@triton.jit
def overflow_program(
    chunk, row, number, begin, size, address, dtype, ticket, report, chunk_lines, scale, UNSCALED: tl.constexpr
):  # fmt: skip
    """Count one chunk; the last program of a grad merges its chunks. All programs of a table call this, or none."""
    if chunk == 0:
        write_heading(report, scale, UNSCALED)
    if dtype == FP64:
        count_span(chunk_lines + chunk.to(tl.int64) * FIELDS, dtype, address, begin, size, tl.float64)
    else:
        count_span(chunk_lines + chunk.to(tl.int64) * FIELDS, dtype, address, begin, size, tl.float32)
    chunks = chunks_of(row)
    if is_last_one_out(ticket, chunks):
        line = report + (1 + number) * FIELDS
        write_line(line, chunk_lines + tl.load(row + AT_FIRST_CHUNK) * FIELDS, chunks, tl.load(row + AT_SIZE))
