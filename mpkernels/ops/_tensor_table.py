"""A list of tensors as a Triton kernel sees it: rows of flat memory in chunks. csrc/common/table.h has it in C++."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpkernels._torch_private.ops import foreach_add_

BLOCK = tl.constexpr(1024)  # elements a program holds at a time: each of its 128 threads loads 16 bytes or more
CHUNK_BYTES = 65536  # of a tensor that one program takes
# The words that each row begins with, and how many these are. An op may add more.
AT_SIZE, AT_FIRST_CHUNK, AT_CHUNK_SIZE, AT_DTYPE, ROW = (tl.constexpr(number) for number in range(5))
FP32 = tl.constexpr(0)
FP16 = tl.constexpr(1)
BF16 = tl.constexpr(2)
FP64 = tl.constexpr(3)
INT8 = tl.constexpr(4)  # only moments are int8

CODES = {
    torch.float32: FP32.value, torch.float16: FP16.value, torch.bfloat16: BF16.value, torch.float64: FP64.value,
    torch.int8: INT8.value,
}  # fmt: skip
KEPT = 256  # lists of tensors whose rows stay on the device
_kept: dict[tuple[torch.device, tuple[int, ...]], tuple[Tensor, int]] = {}  # with the stream that copied; latest last
_captured: dict[int, Tensor] = {}  # by id: rows that CUDA graphs read at every replay, kept alive here


class Table(NamedTuple):
    rows: Tensor  # int64, on the device, as is ``call``: the rows, then the row of each chunk
    call: Tensor  # what each call brings: addresses, a ticket of 0 for each row and one more, the op's further words
    tensors: int
    chunks: int


def build(
    tensors: Sequence[Tensor],
    addresses: Sequence[int],
    call_words: Sequence[int] = (),
    row_words: Sequence[Sequence[int]] | None = None,
    chunk: int | None = None,
) -> Table:
    """Return rows for the sizes and dtypes of ``tensors``, copied to the device only if no earlier call had the same.

    Args:
        tensors: what programs take chunks of.
        addresses: one for each row, new in each call.
        call_words: further words of the op's, new in each call.
        row_words: further words of the op's in each row, after the common ones.
        chunk: elements in a chunk; without it, as many as CHUNK_BYTES hold.
    """
    rows: list[int] = []
    chunks: list[int] = []  # of each row
    first = 0
    for i, tensor in enumerate(tensors):
        per_chunk = chunk or CHUNK_BYTES // tensor.element_size()
        rows += (tensor.numel(), first, per_chunk, CODES[tensor.dtype])
        if row_words is not None:
            rows += row_words[i]
        chunks.append(max(1, triton.cdiv(tensor.numel(), per_chunk)))
        first += chunks[-1]
    device = tensors[0].device
    call = _to_device([*addresses, *[0] * (len(tensors) + 1), *call_words], device)
    return Table(_rows_on(device, tuple(rows), chunks), call, len(tensors), first)


def _rows_on(device: torch.device, rows: tuple[int, ...], chunks: Sequence[int]) -> Tensor:
    """Return the rows on the device. Equal rows share a copy, for the stream that copied and for captures after it."""
    is_cuda = device.type == "cuda"
    stream = torch.cuda.current_stream(device).cuda_stream if is_cuda else 0
    copy, home = _kept.pop((device, rows), (None, stream))
    is_captured = is_cuda and torch.cuda.is_current_stream_capturing()
    if copy is None or (home != stream and not is_captured):
        copy, home = _to_device([*rows, *(i for i, count in enumerate(chunks) for _ in range(count))], device), stream
        if is_captured:
            return copy  # not kept, because only replays make it
    if is_captured:
        _captured[id(copy)] = copy
    _kept[device, rows] = copy, home
    if len(_kept) > KEPT:
        del _kept[next(iter(_kept))]
    return copy


def _to_device(content: Sequence[int], device: torch.device) -> Tensor:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return _written(content, device)
    words = torch.tensor(content, dtype=torch.int64, device="cpu")
    if device.type == "cuda":
        words = words.pin_memory()  # else the copy would wait for the device
    return words.to(device, non_blocking=True)


def _written(content: Sequence[int], device: torch.device) -> Tensor:
    """Return the words in memory of the graph that is being captured. Launches carry them by value, some 90 each: a
    capture can't take pinned memory, and the source of a replay's copy would have to live as long as the graph."""
    words = torch.zeros(len(content), dtype=torch.int64, device=device)
    places = [i for i, word in enumerate(content) if word != 0]
    if places:
        elements = words.unbind()
        foreach_add_([elements[i] for i in places], [content[i] for i in places])
    return words


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
    """Return ``tensor`` if it has the layout of ``like``, else a copy in the dense order of ``like``; in the order of
    indices if ``like`` is not dense."""
    if tensor.is_contiguous() and like.is_contiguous():
        return tensor
    if tensor.stride() == like.stride() and is_dense(like):
        return tensor
    order = torch.preserve_format if is_dense(like) else torch.contiguous_format
    return torch.empty_like(like, dtype=tensor.dtype, memory_format=order).copy_(tensor)


@triton.jit
def find_span(rows, tensors, chunk, ROW: tl.constexpr):
    """Return what one chunk covers: the row's number, the row, the first element, the number of elements."""
    number = tl.load(rows + tensors * ROW + chunk)
    row = rows + number * ROW
    elements, first, per_chunk = tl.load(row + AT_SIZE), tl.load(row + AT_FIRST_CHUNK), tl.load(row + AT_CHUNK_SIZE)
    begin = (chunk - first) * per_chunk
    return number, row, begin, tl.minimum(elements - begin, per_chunk).to(tl.int32)


@triton.jit
def chunks_of(row):
    return tl.maximum(tl.cdiv(tl.load(row + AT_SIZE), tl.load(row + AT_CHUNK_SIZE)), 1)


@triton.jit
def width_of(dtype):
    return tl.where(dtype == FP64, 8, tl.where(dtype == FP32, 4, tl.where(dtype == INT8, 1, 2)))


@triton.jit
def load_span(rows, call, tensors, chunk):
    """Return the row's number, the row, address of the first element, number of elements, dtype."""
    number, row, begin, size = find_span(rows, tensors, chunk, ROW)
    dtype = tl.load(row + AT_DTYPE)
    return number, row, tl.load(call + number) + begin * width_of(dtype), size, dtype


@triton.jit
def head_of(address, width):
    """Return how many elements would fit before the first address that is aligned to 16 bytes."""
    return ((16 - address % 16) % 16 // width).to(tl.int32)


@triton.jit
def head_mask(lanes, head, size):
    """Tell which lanes hold elements of the span, in the block that ends where the aligned elements begin."""
    first = -head + BLOCK  # Triton 3.7's interpreter knows no constant minus a number
    return (lanes >= first) & (lanes < first + size)


@triton.jit
def is_non_finite(x):
    return (x != x) | (tl.abs(x) == float("inf"))


@triton.jit
def is_last_one_out(ticket, expected):
    """Tell whether this is the last of `expected` programs to ask. Then it can read what the others stored before they
    asked, and overwrite what they have read."""
    tl.debug_barrier()
    return tl.atomic_add(ticket, 1, sem="acq_rel") == expected - 1
