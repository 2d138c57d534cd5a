"""Where states are when they visit a GPU: in slots of its memory; and where they are else: in blocks on the host."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpkernels.distributed.parts import part_of
from mpkernels.optim.offload.copies import BUCKET, Lane

LINE = 16  # bytes: kernels read 16 at once

Pair = tuple[Tensor, Tensor]  # the same bytes in a slot and on the host


class Block(NamedTuple):
    """Where the states of one parameter lie on the host: in ``memory``, each at its offset."""

    memory: Tensor
    offsets: dict[str, int]
    state: dict[str, Tensor]  # views of the memory
    made_for: Any  # the options that the states follow

    def holds(self, state: dict[str, Tensor]) -> bool:
        """Return whether these are the states here: a user may have put others in their place, or given them memory."""
        return all(
            state.get(key) is it
            and part_of(it).data_ptr() in (0, self.memory.data_ptr() + self.offsets[key])  # 0: empty
            for key, it in self.state.items()
        )


class Slots:
    """One device's memory through which buckets go in turn, and a stream for each direction. Buckets are numbered from
    0 in each step."""

    COUNT = 3

    def __init__(self, device: torch.device) -> None:
        self.device, self.is_busy = device, False
        self.memory = [torch.empty(0, dtype=torch.uint8, device=device)] * self.COUNT
        self._arriving, self._leaving = Lane(device), Lane(device)
        self._arrived, self._left = ([torch.cuda.Event() for _ in range(self.COUNT)] for _ in range(2))
        self._all_left = torch.cuda.Event()

    def fit(self, sizes: Sequence[int]) -> None:
        """Have a bucket of each size fit in its turn. The host waits if there must be new memory."""
        least = BUCKET if len(sizes) > self.COUNT else 0  # so that memory fits whichever parameters have grads
        needed = [max((least, it.numel(), *sizes[k :: self.COUNT])) for k, it in enumerate(self.memory)]
        if needed == [it.numel() for it in self.memory]:
            return
        self.wait()
        memory = [torch.empty(size, dtype=torch.uint8, device=self.device) for size in needed]
        for it in memory:
            it.record_stream(self._arriving.stream)
            it.record_stream(self._leaving.stream)
        self.follow()  # the current stream may still use what the allocator hands out again
        self.memory = memory

    def follow(self) -> None:
        """Have what is brought later wait for all that the current stream was given so far."""
        self._arriving.follow()

    def begin(self) -> None:
        """Begin a step: the one before must have left, because the pieces of a parameter share a count of steps."""
        self.is_busy = True
        self._arriving.stream.wait_event(self._all_left)

    def bring(self, bucket: int, pairs: Sequence[Pair]) -> None:
        """Start to copy a bucket's states here, once the last ones in this slot have left."""
        k = bucket % self.COUNT
        if bucket >= self.COUNT:
            self._arriving.stream.wait_event(self._left[k])
        self._arriving.copy(pairs)
        self._arrived[k].record(self._arriving.stream)

    def await_arrival(self, bucket: int) -> None:
        torch.cuda.current_stream(self.device).wait_event(self._arrived[bucket % self.COUNT])

    def send(self, bucket: int, pairs: Sequence[Pair]) -> None:
        """Start to copy a bucket's states to the host, once the current stream has stepped them."""
        self._leaving.follow()
        self._leaving.copy((on_host, in_slot) for in_slot, on_host in pairs)
        self._left[bucket % self.COUNT].record(self._leaving.stream)

    def end(self) -> None:
        self._all_left.record(self._leaving.stream)

    def wait(self) -> None:
        """Have the host wait until all that was stepped has left."""
        if self.is_busy:
            self._leaving.wait()
            self.is_busy = False
