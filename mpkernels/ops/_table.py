"""A list of tensors as a Triton kernel sees it: rows of flat memory in chunks. csrc/common/table.h is its C++ twin."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = tl.constexpr(1024)  # elements a program holds at a time: 16 bytes for each of 128 threads, twice
CHUNK = 16384  # elements a program takes in all, a multiple of BLOCK
ROW = tl.constexpr(4)  # words a row has: address, size, first chunk, dtype
FP32 = tl.constexpr(0)
FP16 = tl.constexpr(1)
BF16 = tl.constexpr(2)
FP64 = tl.constexpr(3)

_CODES = {torch.float32: FP32, torch.float16: FP16, torch.bfloat16: BF16, torch.float64: FP64}
_captured: list[Tensor] = []  # a CUDA graph reads these again at every replay


class Table(NamedTuple):
    words: Tensor  # int64, on the device: the rows, then the row of each chunk, then zeroed tickets
    tensors: int
    chunks: int


def build(tensors: Sequence[Tensor], tickets: int = 0) -> Table:
    rows: list[int] = []
    row_of_chunk: list[int] = []
    for i, tensor in enumerate(tensors):
        rows += (tensor.data_ptr(), tensor.numel(), len(row_of_chunk), _CODES[tensor.dtype].value)
        row_of_chunk += [i] * max(1, triton.cdiv(tensor.numel(), CHUNK))
    words = torch.tensor(rows + row_of_chunk + [0] * tickets, dtype=torch.int64)
    device = tensors[0].device
    if device.type == "cuda":
        words = words.pin_memory()  # or the copy would wait for the device
        if torch.cuda.is_current_stream_capturing():
            _captured.append(words)
    return Table(words.to(device, non_blocking=True), len(tensors), len(row_of_chunk))


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without a gap or an overlap, in whichever order of the dimensions."""
    filled = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1
    ):
        if stride != filled:
            return tensor.numel() == 0
        filled *= size
    return True


@triton.jit
def load_span(words, tensors, chunk, CHUNK: tl.constexpr):
    """What one chunk covers: the row's number, address of the first element, number of elements, dtype."""
    number = tl.load(words + tensors * ROW + chunk)
    row = words + number * ROW
    dtype = tl.load(row + 3)
    begin = (chunk - tl.load(row + 2)) * CHUNK
    size = tl.minimum(tl.load(row + 1) - begin, CHUNK)
    width = tl.where(dtype == FP64, 8, tl.where(dtype == FP32, 4, 2))
    return number, tl.load(row) + begin * width, size, dtype


@triton.jit
def whole_blocks(address, size):
    """How many elements can be read 16 bytes at a time, without a mask: all whole blocks if the first is aligned."""
    return tl.where(address % 16 == 0, size // BLOCK * BLOCK, 0)


@triton.jit
def is_non_finite(x):
    return (x != x) | (tl.abs(x) == float("inf"))
