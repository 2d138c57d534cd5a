"""Copies a value from the device to the host without making the host wait."""

from collections import deque

import torch
from torch import Tensor


class Readback:
    """Holds the newest value that has arrived on the host. A value sent inside a CUDA graph stays on the device.

    A capture allows neither to query an event nor to free pinned memory, which would record events. So nothing arrives
    during a capture, and what is outdated stays until a value is sent outside of one.
    """

    def __init__(self) -> None:
        self._arrived: Tensor | None = None
        self._on_its_way: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self._is_pinned = False
        self._outdated: list[object] = []

    def send(self, value: Tensor) -> None:
        if not value.is_cuda or torch.cuda.is_current_stream_capturing():
            if self._is_pinned:
                self.forget()  # an earlier value would arrive after this one, and pass for newer
            self._arrived = value
            return
        self._outdated.clear()
        copy = value.to("cpu", non_blocking=True)  # into pinned memory
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(value.device))
        self._on_its_way.append((copy, event))
        self._is_pinned = True
        self.read()

    def forget(self) -> None:
        """Drop the value, and those on their way."""
        if self._is_pinned:
            self._outdated += self._arrived, self._on_its_way
        self._arrived, self._on_its_way, self._is_pinned = None, deque(), False

    def read(self) -> Tensor | None:
        if self._on_its_way and not torch.cuda.is_current_stream_capturing():
            while self._on_its_way and self._on_its_way[0][1].query():
                self._arrived, _ = self._on_its_way.popleft()
        return self._arrived
