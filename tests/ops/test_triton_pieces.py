"""Pieces of the Triton kernels that whole ops reach only at sizes too slow to interpret."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from mpkernels.ops import _tensor_table
from mpkernels.ops._tensor_table import BF16, BLOCK, FP16, head_of
from mpkernels.ops.grads.grad_stats_triton import sum_of
from mpkernels.ops.grads.overflow_kernel import write_line
from mpkernels.ops.step import split as reference
from mpkernels.ops.step.split_kernel import join, split

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # compiled there, interpreted here


@triton.jit
def store_sum_of(out, values, count):
    tl.store(out, sum_of(values, count))


@triton.jit(do_not_specialize=["count"])  # or a count of 1 would be a constant, which kernels read from memory
def store_line(line, chunk_lines, count):
    write_line(line, chunk_lines, count, count)


@triton.jit
def store_head(out, address, width):
    tl.store(out, head_of(address, width))


@triton.jit
def store_split_and_joined(masters, weights, remainders, joined, dtype: tl.constexpr, size: tl.constexpr):
    at = tl.program_id(0) * size + tl.arange(0, size)
    weight, remainder = split(tl.load(masters + at), dtype)
    tl.store(weights + at, weight)
    tl.store(remainders + at, remainder)
    tl.store(joined + at, join(weight, remainder, dtype))


def test_sums_may_have_more_terms_than_a_block():
    values = torch.arange(2 * BLOCK.value + 3, dtype=torch.float64, device=DEVICE)
    for count in (1, BLOCK.value, BLOCK.value + 1, values.numel()):
        out = torch.zeros((), dtype=torch.float64, device=DEVICE)
        store_sum_of[(1,)](out, values, count)
        assert out.item() == count * (count - 1) / 2


def test_the_reports_of_any_number_of_chunks_are_merged():
    chunk_lines = torch.rand(300, 6, dtype=torch.float64, device=DEVICE).mul(1000).round()
    for count in (1, 128, 129, 300):
        line = torch.full((6,), -7.0, dtype=torch.float64, device=DEVICE)
        store_line[(1,)](line, chunk_lines, count)
        infs, nans, first, largest, zeros = chunk_lines[:count, 1:].unbind(1)
        assert line.tolist() == [count, infs.sum(), nans.sum(), first.min(), largest.max(), zeros.sum()]


@pytest.mark.parametrize("width", [2, 4, 8])
def test_a_head_ends_where_16_bytes_can_be_read_at_a_time(width):
    for misaligned_by in range(0, 32, width):
        out = torch.zeros((), dtype=torch.int32, device=DEVICE)
        store_head[(1,)](out, 1 << 40 | misaligned_by, width)
        assert out.item() == -misaligned_by % 16 // width


@pytest.fixture
def kept(monkeypatch):
    monkeypatch.setattr(_tensor_table, "_kept", {})
    return _tensor_table._kept


def test_rows_stay_on_the_device_as_long_as_the_list_is_the_same(kept):
    grads = [torch.ones(size, device=DEVICE) for size in (3, 40_000)]
    first, again = (_tensor_table.build(grads, [address, 16], call_words=[address]) for address in (32, 48))
    assert again.rows is first.rows
    assert first.rows.tolist() == [3, 0, 16384, 0, 40_000, 1, 16384, 0, 0, 1, 1, 1]
    assert again.call.tolist() == [48, 16, 0, 0, 0, 48]
    assert (first.tensors, first.chunks) == (2, 4)
    assert _tensor_table.build([grads[0].half(), grads[1]], [16, 32]).rows is not first.rows
    assert _tensor_table.build(grads, [16, 32], chunk=8192).rows is not first.rows


def test_only_the_rows_used_last_stay_on_the_device(kept, monkeypatch):
    monkeypatch.setattr(_tensor_table, "KEPT", 2)
    lists = [[torch.ones(size, device=DEVICE)] for size in (1, 2, 3)]
    first, _, _ = (_tensor_table.build(each, [16]).rows for each in (*lists[:2], lists[0]))
    _tensor_table.build(lists[2], [16])
    assert _tensor_table.build(lists[0], [16]).rows is first  # the second was used longest ago
    assert len(kept) == 2


@pytest.mark.parametrize(("dtype", "code"), [(torch.bfloat16, BF16), (torch.float16, FP16)], ids=["bf16", "fp16"])
def test_masters_are_split_and_joined_to_the_bit(dtype, code):
    """The masters have every upper half of an fp32 number, beside some lower halves: ties and their neighbours."""
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
