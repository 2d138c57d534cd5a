"""A list of tensors as a Triton kernel sees it: rows of flat memory in chunks. csrc/common/table.h is its C++ twin."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = tl.constexpr(1024)  # elements a program holds at a time: of 128 threads each loads 16 bytes or more
CHUNK = 16384  # elements a program takes in all, a multiple of BLOCK
ROW = tl.constexpr(4)  # words a row has at least: address, size, first chunk, dtype; an op may add its own
FP32 = tl.constexpr(0)
FP16 = tl.constexpr(1)
BF16 = tl.constexpr(2)
FP64 = tl.constexpr(3)

CODES = {torch.float32: FP32.value, torch.float16: FP16.value, torch.bfloat16: BF16.value, torch.float64: FP64.value}
_captured: list[Tensor] = []  # a CUDA graph reads these again at every replay
_spare = torch.empty(0, dtype=torch.int64, device="cpu")  # pinned, for those: a graph's capture allows taking none
SPARE_TABLES = 16  # as large as the largest: what a few graphs of a training step capture


class Table(NamedTuple):
    words: Tensor  # int64, on the device: the rows, then the row of each chunk, then what the op wants beside them
    tensors: int
    chunks: int


def build(tensors: Sequence[Tensor], beside: Sequence[int] = (), own: Sequence[Sequence[int]] | None = None) -> Table:
    """``own[i]`` are the op's own words in row i, after the common ones."""
    rows: list[int] = []
    row_of_chunk: list[int] = []
    for i, tensor in enumerate(tensors):
        rows += (tensor.data_ptr(), tensor.numel(), len(row_of_chunk), CODES[tensor.dtype])
        if own is not None:
            rows += own[i]
        row_of_chunk += [i] * max(1, triton.cdiv(tensor.numel(), CHUNK))
    words = torch.tensor([*rows, *row_of_chunk, *beside], dtype=torch.int64, device="cpu")
    device = tensors[0].device
    if device.type == "cuda":
        words = _pinned(words)  # or the copy would wait for the device
    return Table(words.to(device, non_blocking=True), len(tensors), len(row_of_chunk))


def _pinned(words: Tensor) -> Tensor:
    global _spare
    if not torch.cuda.is_current_stream_capturing():
        if len(_spare) < SPARE_TABLES * len(words):
            _spare = torch.empty(SPARE_TABLES * len(words), dtype=torch.int64, device="cpu", pin_memory=True)
        return words.pin_memory()
    if len(_spare) < len(words):
        raise RuntimeError(
            f"a CUDA graph's capture allows taking no pinned memory, and of {len(words)} words for a Triton kernel's "
            f"list of tensors {len(_spare)} are at hand: make the same call before, outside of the capture"
        )
    captured, _spare = _spare[: len(words)].copy_(words), _spare[len(words) :]
    _captured.append(captured)
    return captured


def is_dense(tensor: Tensor) -> bool:
    """Return whether elements fill their memory without a gap or an overlap, in whichever order of the dimensions."""
    filled = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1
    ):
        if stride != filled:
            return tensor.numel() == 0
        filled *= size
    return True


def lend(tensor: Tensor, like: Tensor) -> Tensor:
    """``tensor`` with its elements in the dense order of ``like``: itself, or a copy if it has another layout; in
    the order of indices if that is not dense."""
    if tensor.is_contiguous() and like.is_contiguous():
        return tensor
    if tensor.stride() == like.stride() and is_dense(like):
        return tensor
    order = torch.preserve_format if is_dense(like) else torch.contiguous_format
    return torch.empty_like(like, dtype=tensor.dtype, memory_format=order).copy_(tensor)


@triton.jit
def find_span(words, tensors, chunk, CHUNK: tl.constexpr, ROW: tl.constexpr):
    """Return what one chunk covers: the row's number, the row, the first element, the number of elements."""
    number = tl.load(words + tensors * ROW + chunk)
    row = words + number * ROW
    begin = (chunk - tl.load(row + 2)) * CHUNK
    return number, row, begin, tl.minimum(tl.load(row + 1) - begin, CHUNK).to(tl.int32)


@triton.jit
def load_span(words, tensors, chunk, CHUNK: tl.constexpr):
    """Return the row's number, address of the first element, number of elements, dtype."""
    number, row, begin, size = find_span(words, tensors, chunk, CHUNK, ROW)
    dtype = tl.load(row + 3)
    width = tl.where(dtype == FP64, 8, tl.where(dtype == FP32, 4, 2))
    return number, tl.load(row) + begin * width, size, dtype


@triton.jit
def whole_blocks(address, size):
    """How many elements can be read 16 bytes at a time, without a mask: all whole blocks if the first is aligned."""
    return tl.where(address % 16 == 0, size // BLOCK * BLOCK, 0)


@triton.jit
def block_at(address, at, mask, T: tl.constexpr):
    """Pointers to a block of elements. That of a whole block, which needs no mask, is aligned."""
    array = address.to(tl.pointer_type(T))
    if mask is None:
        array = tl.multiple_of(array, 16)
    return array + at


@triton.jit
def load_as(compute: tl.constexpr, dtype, address, at, mask):
    """Return a block in the computing type, fp32 or fp64. Arrays that are computed with in fp64 are in fp64."""
    if compute == tl.float64:
        values = tl.load(block_at(address, at, mask, tl.float64), mask=mask)
    elif dtype == FP32:
        values = tl.load(block_at(address, at, mask, tl.float32), mask=mask)
    elif dtype == BF16:
        values = tl.load(block_at(address, at, mask, tl.bfloat16), mask=mask).to(tl.float32)
    else:
        values = tl.load(block_at(address, at, mask, tl.float16), mask=mask).to(tl.float32)
    return values


@triton.jit
def store_as(values, dtype, address, at, mask):
    if values.dtype == tl.float64:
        tl.store(block_at(address, at, mask, tl.float64), values, mask=mask)
    elif dtype == FP32:
        tl.store(block_at(address, at, mask, tl.float32), values, mask=mask)
    elif dtype == BF16:
        tl.store(block_at(address, at, mask, tl.bfloat16), values.to(tl.bfloat16), mask=mask)
    else:
        tl.store(block_at(address, at, mask, tl.float16), values.to(tl.float16), mask=mask)


@triton.jit
def is_non_finite(x):
    return (x != x) | (tl.abs(x) == float("inf"))


@triton.jit
def is_last_one_out(ticket, expected):
    """Tell whether this is the last of `expected` programs to ask; then what the others stored before can be read."""
    tl.debug_barrier()
    return tl.atomic_add(ticket, 1, sem="acq_rel") == expected - 1
