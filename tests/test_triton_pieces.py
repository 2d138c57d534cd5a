"""Pieces of the Triton kernels that whole ops reach only at sizes too slow to interpret."""

import torch
import triton
import triton.language as tl

from mpkernels.ops._overflow_kernel import write_line
from mpkernels.ops._table import BLOCK, whole_blocks
from mpkernels.ops.grad_stats_triton import sum_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # compiled there, interpreted here


@triton.jit
def store_sum_of(out, values, count):
    tl.store(out, sum_of(values, count))


@triton.jit
def store_line(line, of_chunk, count):
    write_line(line, of_chunk, count, count)


@triton.jit
def store_whole_blocks(out, address, size):
    tl.store(out, whole_blocks(address, size))


def test_sums_go_beyond_one_block():
    values = torch.arange(2 * BLOCK.value + 3, dtype=torch.float64, device=DEVICE)
    for count in (1, BLOCK.value, BLOCK.value + 1, values.numel()):
        out = torch.zeros((), dtype=torch.float64, device=DEVICE)
        store_sum_of[(1,)](out, values, count)
        assert out.item() == count * (count - 1) / 2


def test_reports_are_merged_of_any_number_of_chunks():
    of_chunk = torch.rand(300, 6, dtype=torch.float64, device=DEVICE).mul(1000).round()
    for count in (1, 128, 129, 300):
        line = torch.full((6,), -7.0, dtype=torch.float64, device=DEVICE)
        store_line[(1,)](line, of_chunk, count)
        infs, nans, first, largest, zeros = of_chunk[:count, 1:].unbind(1)
        assert line.tolist() == [count, infs.sum(), nans.sum(), first.min(), largest.max(), zeros.sum()]


def test_only_aligned_memory_is_read_16_bytes_at_a_time():
    size = 3 * BLOCK.value + 5
    for misaligned_by, want in ((0, 3 * BLOCK.value), (16, 3 * BLOCK.value), (2, 0), (4, 0), (8, 0)):
        out = torch.zeros((), dtype=torch.int64, device=DEVICE)
        store_whole_blocks[(1,)](out, 1 << 40 | misaligned_by, size)
        assert out.item() == want
