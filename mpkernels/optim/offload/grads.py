"""Grads on their way to the host: those of the whole model inside a backward, or a bucket's inside a step."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mpkernels.distributed.parts import parts_of, settled_grads
from mpkernels.optim.offload.copies import Lanes, Pinned, dense, pinned, shaped, size_of


class _Slot:
    """Where one parameter's grads arrive, and the sum of those that came before."""

    def __init__(self, like: Tensor, memory: Pinned) -> None:
        self.arrival, self.event = memory.like(like), torch.cuda.Event()
        self.has_arrival = False
        self.sum: Tensor | None = None
        self._room: Tensor | None = None  # for a sum, once there was one

    def fits(self, grad: Tensor) -> bool:
        return (grad.shape, grad.dtype) == (self.arrival.shape, self.arrival.dtype)

    def add_up(self) -> None:
        """Add what has arrived to the sum, which has at least 32 bits. The host waits."""
        if not self.has_arrival:
            return
        if self._room is None:
            wide = torch.promote_types(self.arrival.dtype, torch.float32)
            self._room = torch.empty_like(self.arrival, dtype=wide)
        self.event.synchronize()
        self.sum = self._room.copy_(self.arrival) if self.sum is None else self.sum.add_(self.arrival)
        self.has_arrival = False

    def value(self) -> Tensor:
        """Return the one grad, as it is, or the sum of several. The host waits."""
        if self.sum is not None:
            self.add_up()
            return self.sum
        self.event.synchronize()
        return self.arrival


class HostGrads:
    """The grads that ``release_grads`` sends to the host and frees. There they wait for the step."""

    def __init__(self) -> None:
        self._lanes, self._pinned = Lanes(), Pinned()
        self._slots: dict[Tensor, _Slot] = {}

    @torch.no_grad()
    def take(self, param: Tensor) -> None:
        """Send a GPU parameter's grad to the host, behind what the current stream was given so far, and free it.
        Earlier grads of the parameter are added up."""
        grad = settled_grads([param])[0]
        if grad is None or not grad.is_cuda or grad.layout != torch.strided or torch.cuda.is_current_stream_capturing():
            return
        part = dense(parts_of([grad])[0].detach())
        lane, slot = self._lanes[part.device], self._slots.get(param)
        if slot is not None:
            slot.add_up()
        if slot is None or not slot.fits(part):
            before = None if slot is None else slot.sum
            slot = _Slot(part, self._pinned)
            slot.sum, self._slots[param] = before, slot
        lane.follow()
        lane.copy([(slot.arrival, part)])
        slot.event.record(lane.stream)
        part.record_stream(lane.stream)  # part is freed while it is copied
        slot.has_arrival, param.grad = True, None

    def have(self, param: Tensor) -> bool:
        slot = self._slots.get(param)
        return slot is not None and (slot.has_arrival or slot.sum is not None)

    def of(self, param: Tensor) -> Tensor:
        """Return a parameter's grad, or the sum of several. The host waits until it is there."""
        return self._slots[param].value()

    def forget(self) -> None:
        """Forget the grads, and keep their memory for the next ones."""
        for slot in self._slots.values():
            slot.has_arrival, slot.sum = False, None


class Slices:
    """Three slices of pinned memory, through which the grads of bucket after bucket come to the host."""

    COUNT = 3

    def __init__(self) -> None:
        self._lanes = Lanes()
        self._memory = [torch.empty(0, dtype=torch.uint8)] * self.COUNT
        self._events: dict[int, list[torch.cuda.Event]] = {}

    def lay_out(self, buckets: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Return where the grads of each bucket will lie: in the slices in turn."""
        for i, grads in enumerate(buckets):
            size = sum(map(size_of, grads))
            if self._memory[i % self.COUNT].numel() < size:
                self._memory[i % self.COUNT] = pinned(size)
        return [_one_after_another(self._memory[i % self.COUNT], grads) for i, grads in enumerate(buckets)]

    def begin(self, grads: Sequence[Tensor]) -> None:
        """Have later copies wait for all that the current streams of these grads' devices were given so far."""
        for lane in {self._lanes[grad.device]: None for grad in grads}:
            lane.follow()

    def start(self, bucket: int, grads: Sequence[Tensor], there: Sequence[Tensor]) -> None:
        """Start to copy a bucket's grads into its slice, which must not be in use any more."""
        lanes = self._lanes.copy_all(list(zip(there, grads, strict=True)))
        self._events[bucket] = [lane.stream.record_event() for lane in lanes]

    def wait(self, bucket: int) -> None:
        """Have the host wait until a bucket's grads are there."""
        for event in self._events.pop(bucket):
            event.synchronize()


def _one_after_another(memory: Tensor, grads: Sequence[Tensor]) -> list[Tensor]:
    places = []
    for grad in grads:
        size = size_of(grad)
        places.append(shaped(memory[:size], grad))
        memory = memory[size:]
    return places
