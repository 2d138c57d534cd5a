"""What copies between a GPU and the host need: pinned memory, and a stream for each direction."""

import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mpkernels._shared.parameters import by_device

BUCKET = 64 << 20  # bytes of grads; torch's allocator of pinned memory rounds up to a power of 2
_LINE = 64  # bytes: pieces of pinned memory begin at multiples


class Lane:
    """One device's stream for copies in one direction."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)

    def follow(self) -> None:
        """Have later copies wait for all that the device's current stream was given so far."""
        self.stream.wait_event(torch.cuda.current_stream(self.device).record_event())

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Start to copy each pair's second to its first. Pinned memory must not be changed until that is done."""
        with torch.cuda.stream(self.stream):
            for to, source in pairs:
                to.copy_(source, non_blocking=True)

    def be_followed(self) -> None:
        """Have the device's current stream wait for the copies so far."""
        torch.cuda.current_stream(self.device).wait_event(self.stream.record_event())

    def wait(self) -> None:
        """Have the host wait for the copies so far."""
        self.stream.synchronize()


class Lanes(dict[torch.device, Lane]):
    """The lanes of one direction, by device, each made when it is first looked up."""

    def __missing__(self, device: torch.device) -> Lane:
        return self.setdefault(device, Lane(device))

    def copy_all(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Lane]:
        """Start to copy to the first of each pair from the second, by the lane of the one that is on a GPU. Return the
        lanes that are used."""
        on_device = (to if to.is_cuda else source for to, source in pairs)
        pairs_by_device = by_device(on_device, pairs)
        for device, pairs_there in pairs_by_device.items():
            self[device].copy(pairs_there)
        return [self[device] for device in pairs_by_device]


class Pinned:
    """Pinned memory, handed out in pieces. All of it is freed with this object and its pieces."""

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._lock = threading.Lock()  # backwards of several devices run in as many threads

    def like(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the shape and dtype of ``tensor``, and of its strides if they leave no gaps."""
        return shaped(self.take(size_of(tensor)), tensor)

    def take(self, size: int) -> Tensor:
        """Return so many bytes, side by side with those before if there is room."""
        with self._lock:
            if self._left.numel() < size:
                self._left = pinned(max(1 << (size - 1).bit_length(), BUCKET))  # torch rounds up to a power of 2
            piece, self._left = self._left[:size], self._left[size:]
        return piece


def pinned(size: int) -> Tensor:
    try:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError as error:
        raise RuntimeError(
            f"mpkernels: offload needs {size} bytes more of pinned memory, which the host doesn't give ({error}); free "
            "memory, raise the limit that `ulimit -l` shows, or leave offload out"
        ) from error


def size_of(tensor: Tensor) -> int:
    """Return how many bytes of pinned memory a tensor takes."""
    return -(-tensor.numel() * tensor.itemsize // _LINE) * _LINE


def shaped(memory: Tensor, like: Tensor) -> Tensor:
    """Return the beginning of this memory as a tensor like the other one, with a version of its own."""
    flat = memory[: like.numel() * like.itemsize].view(like.dtype).data
    return flat.as_strided(like.shape, torch.empty_like(like, device="meta").stride())


def dense(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy if its elements leave gaps or share memory, or differ from it in their signs. The
    result goes to the host in a single copy, for which nothing is allocated."""
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride():
        return tensor
    return torch.empty_like(tensor).copy_(tensor)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold back Ctrl-C until the end of this context."""
    before, pressed = signal.getsignal(signal.SIGINT), []
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield  # Python raises KeyboardInterrupt in the main thread alone
        return

    def note(*arguments: Any) -> None:
        pressed.append(arguments)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if pressed:
            before(*pressed[0])
