"""Pieces of the Triton kernels that whole ops reach only at sizes too slow to interpret."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from mpkernels.ops import _table
from mpkernels.ops._table import BF16, BLOCK, FP16, whole_blocks
from mpkernels.ops.adamw import split as reference
from mpkernels.ops.adamw.split_kernel import join, split
from mpkernels.ops.grads.grad_stats_triton import sum_of
from mpkernels.ops.grads.overflow_kernel import write_line
from tests.late_device import DEVICE as LATE
from tests.late_device import late_device

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


@triton.jit
def store_split_and_joined(masters, weights, remainders, joined, dtype: tl.constexpr, size: tl.constexpr):
    at = tl.program_id(0) * size + tl.arange(0, size)
    weight, remainder = split(tl.load(masters + at), dtype)
    tl.store(weights + at, weight)
    tl.store(remainders + at, remainder)
    tl.store(joined + at, join(weight, remainder, dtype))


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


@pytest.mark.parametrize(("dtype", "code"), [(torch.bfloat16, BF16), (torch.float16, FP16)], ids=["bf16", "fp16"])
def test_masters_are_split_and_joined_to_the_bit(dtype, code):
    """Every upper half of an fp32 with some lower ones, ties and their neighbours among them."""
    upper = torch.arange(1 << 16, device=DEVICE)
    lower = (0, 1, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xF000, 0xFFFE, 0xFFFF)
    masters = torch.cat([upper << 16 | low for low in lower]).to(torch.int32).view(torch.float32)
    masters = masters[~masters.isnan()]
    masters = masters[: masters.numel() // 4096 * 4096]
    want = reference.split(masters, dtype)
    weights, remainders = (torch.empty(masters.numel(), dtype=torch.int16, device=DEVICE) for _ in range(2))
    joined = torch.empty_like(masters)
    with np.errstate(all="ignore"):  # the interpreter's numpy warns of every inf
        store_split_and_joined[(masters.numel() // 4096,)](masters, weights, remainders, joined, code.value, 4096)
    assert torch.equal(weights, want[0].view(torch.int16))
    assert torch.equal(remainders, want[1])
    assert torch.equal(joined.view(torch.int32), reference.join(*want).view(torch.int32))


@pytest.fixture
def capturing(monkeypatch):
    """A device that captures a graph, and some grads there."""
    monkeypatch.setattr(_table, "_spare", _table._spare[:0])
    monkeypatch.setattr(_table, "_captured", [])
    with late_device() as device:
        yield device, [torch.ones(5, device=LATE), torch.ones(40_000, device=LATE)]


def test_a_captured_table_is_copied_from_memory_that_was_pinned_before(capturing):
    device, grads = capturing
    eager = _table.build(grads, beside=[7])
    device.is_capturing = True
    for _ in range(_table.SPARE_TABLES):
        captured = _table.build(grads, beside=[8])
        assert captured.words.memory[:-1].equal(eager.words.memory[:-1])
        assert captured.words.memory[-1] == 8
    assert len({each.data_ptr() for each in _table._captured}) == _table.SPARE_TABLES  # each replay reads its own


def test_a_capture_that_nothing_came_before_is_told_so(capturing):
    device, grads = capturing
    device.is_capturing = True
    with pytest.raises(RuntimeError, match="of 12 words for a Triton kernel's list of tensors 0 are at hand: make the"):
        _table.build(grads)
