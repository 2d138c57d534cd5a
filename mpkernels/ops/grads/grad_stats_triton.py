"""grad_stats in Triton: one program a chunk; the last of a tensor adds up its chunks, the last of all the tensors."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpkernels.ops import _table
from mpkernels.ops._registry import implement
from mpkernels.ops._table import (
    BF16,
    BLOCK,
    FP16,
    FP32,
    chunks_of,
    head_mask,
    head_of,
    is_last_one_out,
    is_non_finite,
    load_span,
)
from mpkernels.ops.grads.grad_stats import _grad_stats


@triton.jit
def stats_of_span(address, size, T: tl.constexpr):
    """Each lane adds up every BLOCKth element in order, wherever the first aligned one is: so the bits stay."""
    head = head_of(address, T.primitive_bitwidth // 8)
    grads = tl.multiple_of((address + head * (T.primitive_bitwidth // 8)).to(tl.pointer_type(T)), 16)
    lanes = tl.arange(0, BLOCK)
    left = tl.maximum(size - head, 0)
    whole = left // (4 * BLOCK) * (4 * BLOCK)
    sumsq = tl.zeros([BLOCK], tl.float64)
    bad = tl.zeros([BLOCK], tl.int1)
    if head > 0:
        sumsq, bad = add(tl.load(grads - BLOCK + lanes, mask=head_mask(lanes, head, size), other=0), sumsq, bad)
    for begin in range(0, whole, 4 * BLOCK):
        at = grads + begin + lanes
        first, second = tl.load(at), tl.load(at + BLOCK)
        third, fourth = tl.load(at + 2 * BLOCK), tl.load(at + 3 * BLOCK)
        sumsq, bad = add(first, sumsq, bad)
        sumsq, bad = add(second, sumsq, bad)
        sumsq, bad = add(third, sumsq, bad)
        sumsq, bad = add(fourth, sumsq, bad)
    for begin in range(whole, left, BLOCK):
        sumsq, bad = add(tl.load(grads + begin + lanes, mask=begin + lanes < left, other=0), sumsq, bad)
    if head > 0:  # else the gather would change nothing, and ask for shared memory
        sumsq = tl.gather(sumsq, (lanes + BLOCK - head) % BLOCK, 0)
    total = tl.sum(sumsq)
    is_bad = tl.max(bad.to(tl.float64)) if T.is_fp64() else is_non_finite(total).to(tl.float64)
    return total, is_bad


@triton.jit
def add(grad, sumsq, bad):
    wide = grad.to(tl.float64)
    if grad.dtype.is_fp64():  # of any other the squares stay finite
        bad |= is_non_finite(wide)
    return sumsq + wide * wide, bad


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
def grad_stats_kernel(rows, call, tensors, chunks, sumsq, nonfinite, total_sumsq, found_inf, of_chunk):
    chunk = tl.program_id(0)
    tensor, row, address, size, dtype = load_span(rows, call, tensors, chunk)
    if dtype == FP32:
        share, bad = stats_of_span(address, size, tl.float32)
    elif dtype == FP16:
        share, bad = stats_of_span(address, size, tl.float16)
    elif dtype == BF16:
        share, bad = stats_of_span(address, size, tl.bfloat16)
    else:
        share, bad = stats_of_span(address, size, tl.float64)
    bad_of_chunk = of_chunk + chunks
    tl.store(of_chunk + chunk, share)
    tl.store(bad_of_chunk + chunk, bad)

    first, count = tl.load(row + 1), chunks_of(row)
    tickets = call + tensors
    if is_last_one_out(tickets + tensor, count):
        tl.store(sumsq + tensor, sum_of(of_chunk + first, count))
        tl.store(nonfinite + tensor, tl.where(sum_of(bad_of_chunk + first, count) > 0, 1.0, 0.0))
        if is_last_one_out(tickets + tensors, tensors):
            tl.store(total_sumsq, sum_of(sumsq, tensors))
            tl.store(found_inf, tl.where(sum_of(nonfinite, tensors) > 0, 1.0, 0.0))


@implement(_grad_stats)
def grad_stats_triton(grads: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    flat = [grad if _table.is_dense(grad) else grad.contiguous() for grad in grads]
    table = _table.build(flat, [grad.data_ptr() for grad in flat])
    sumsq, of_chunk = (
        torch.empty(size, dtype=torch.float64, device=table.rows.device) for size in (table.tensors, 2 * table.chunks)
    )
    nonfinite = torch.empty(table.tensors, dtype=torch.float32, device=table.rows.device)
    results = sumsq, nonfinite, sumsq.new_empty(()), nonfinite.new_empty(())
    grad_stats_kernel[(table.chunks,)](*table, *results, of_chunk, enable_fp_fusion=False)
    return results
