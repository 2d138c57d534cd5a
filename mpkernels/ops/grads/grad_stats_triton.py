"""grad_stats in Triton: one program a chunk; the last of a tensor adds up its chunks, the last of all the tensors."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpkernels.ops import _table
from mpkernels.ops._registry import implement
from mpkernels.ops._table import BF16, BLOCK, FP16, FP32, ROW, is_last_one_out, is_non_finite, load_span, whole_blocks
from mpkernels.ops.grads.grad_stats import _grad_stats


@triton.jit
def stats_of_span(address, size, T: tl.constexpr):
    whole = whole_blocks(address, size)
    lanes = tl.arange(0, BLOCK)
    sumsq = tl.zeros([BLOCK], tl.float64)
    bad = tl.zeros([BLOCK], tl.int1)
    aligned = tl.multiple_of(address.to(tl.pointer_type(T)), 16)
    for begin in range(0, whole, BLOCK):
        grad = tl.load(aligned + begin + lanes).to(tl.float64)
        sumsq += grad * grad
        if T.is_fp64():  # of any other the squares stay finite
            bad |= is_non_finite(grad)
    grads = address.to(tl.pointer_type(T))
    for begin in range(whole, size, BLOCK):
        grad = tl.load(grads + begin + lanes, mask=begin + lanes < size, other=0).to(tl.float64)
        sumsq += grad * grad
        if T.is_fp64():
            bad |= is_non_finite(grad)
    total = tl.sum(sumsq)
    is_bad = tl.max(bad.to(tl.float64)) if T.is_fp64() else is_non_finite(total).to(tl.float64)
    return total, is_bad


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
def grad_stats_kernel(
    words, tensors, chunks, sumsq, nonfinite, total_sumsq, found_inf, sumsq_of_chunk, bad_of_chunk, CHUNK: tl.constexpr
):
    chunk = tl.program_id(0)
    tensor, address, size, dtype = load_span(words, tensors, chunk, CHUNK)
    if dtype == FP32:
        share, bad = stats_of_span(address, size, tl.float32)
    elif dtype == FP16:
        share, bad = stats_of_span(address, size, tl.float16)
    elif dtype == BF16:
        share, bad = stats_of_span(address, size, tl.bfloat16)
    else:
        share, bad = stats_of_span(address, size, tl.float64)
    tl.store(sumsq_of_chunk + chunk, share)
    tl.store(bad_of_chunk + chunk, bad)

    row = words + tensor * ROW
    first = tl.load(row + 2)
    chunks_of_tensor = tl.maximum(tl.cdiv(tl.load(row + 1), CHUNK), 1)
    tickets = words + tensors * ROW + chunks
    if is_last_one_out(tickets + tensor, chunks_of_tensor):
        tl.store(sumsq + tensor, sum_of(sumsq_of_chunk + first, chunks_of_tensor))
        tl.store(nonfinite + tensor, tl.where(sum_of(bad_of_chunk + first, chunks_of_tensor) > 0, 1.0, 0.0))
        if is_last_one_out(tickets + tensors, tensors):
            tl.store(total_sumsq, sum_of(sumsq, tensors))
            tl.store(found_inf, tl.where(sum_of(nonfinite, tensors) > 0, 1.0, 0.0))


@implement(_grad_stats)
def grad_stats_triton(grads: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    flat = [grad if _table.is_dense(grad) else grad.contiguous() for grad in grads]
    table = _table.build(flat, beside=[0] * (len(flat) + 1))
    sumsq, sumsq_of_chunk, bad_of_chunk = (
        torch.empty(size, dtype=torch.float64, device=table.words.device)
        for size in (table.tensors, table.chunks, table.chunks)
    )
    nonfinite = torch.empty(table.tensors, dtype=torch.float32, device=table.words.device)
    results = sumsq, nonfinite, sumsq.new_empty(()), nonfinite.new_empty(())
    grad_stats_kernel[(table.chunks,)](
        *table, *results, sumsq_of_chunk, bad_of_chunk, CHUNK=_table.CHUNK, enable_fp_fusion=False
    )
    return results
