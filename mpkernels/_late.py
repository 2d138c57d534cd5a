"""What a device has to say, for a host that won't wait for it."""

from collections import deque

import torch
from torch import Tensor


class Late:
    """The last value that has arrived on the host: at most one older than the last that was sent."""

    def __init__(self) -> None:
        self._sent: deque[tuple[Tensor, torch.cuda.Event | None]] = deque(maxlen=2)

    def send(self, value: Tensor) -> None:
        if not value.is_cuda or torch.cuda.is_current_stream_capturing():
            self._sent.append((value, None))  # a CUDA graph is read after its replay, by whoever replays it
            return
        copy = value.to("cpu", non_blocking=True)  # into pinned memory
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(value.device))
        self._sent.append((copy, event))

    def read(self) -> Tensor | None:
        if not self._sent:
            return None
        value, event = self._sent[-1]
        if event is not None and len(self._sent) == 2 and not event.query():
            value, event = self._sent[0]
        if event is not None:
            event.synchronize()  # which the device has passed, unless it lags more than a step behind
        return value
