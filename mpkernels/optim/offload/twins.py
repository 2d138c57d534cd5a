"""The copies on the host of weights on a GPU: each holds what its weight holds, whichever of the two was written to."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from mpkernels._shared.parameters import is_sharded
from mpkernels._torch_private.tensors import version_of
from mpkernels.distributed.parts import parts_of, placed_as
from mpkernels.optim.offload.copies import Lanes, Pinned, dense


class Twin:
    """A weight's copy on the host."""

    def __init__(self, param: Tensor, pinned: Pinned) -> None:
        part = _part_of(param)
        self.part = pinned.like(part)
        self.weight: Tensor = placed_as(param, self.part)  # a DTensor where the parameter is one
        self.fetch(param, part)

    @torch.no_grad()
    def fetch(self, param: Tensor, part: Tensor) -> None:
        """Take over the weight. The host waits."""
        self.part.copy_(part)
        has_gaps = dense(part) is not part
        self.room = torch.empty_like(part) if has_gaps else None  # on the GPU, for a weight with gaps in its memory
        self.note(param, part)

    def note(self, param: Tensor, part: Tensor) -> None:
        """Remember that weight and twin are the same now."""
        self._weight_then, self._twin_then = _mark(param, part), version_of(self.part)

    def is_behind(self, param: Tensor, part: Tensor) -> bool:
        """Return whether somebody has written to the weight, or given it other memory."""
        return self._weight_then != _mark(param, part)

    def is_ahead(self) -> bool:
        """Return whether somebody has written to the copy."""
        return self._twin_then != version_of(self.part)

    def fits(self, part: Tensor) -> bool:
        return part.is_cuda and part.dtype == self.part.dtype and part.shape == self.part.shape


def _part_of(param: Tensor) -> Tensor:
    """Return the parameter itself, or the tensor that a DTensor holds: the one whose changes are counted."""
    part: Tensor = parts_of([param])[0]
    return part


def _mark(param: Tensor, part: Tensor) -> tuple[object, ...]:
    return part.device, part.data_ptr(), version_of(part), version_of(param)


class Twins:
    """All twins of an optimizer's parameters, and the stream by which weights go back."""

    def __init__(self) -> None:
        self._lanes = Lanes()
        self._forget()

    def _forget(self) -> None:
        self._twins: dict[Tensor, Twin] = {}
        self._pinned = Pinned()

    def __len__(self) -> int:
        return len(self._twins)

    def home(self, param: Tensor) -> Tensor:
        """Return what states and plans take in a parameter's place: its twin, if it is on a GPU."""
        if not param.is_cuda:
            return param
        if param not in self._twins:
            self._twins[param] = Twin(param, self._pinned)
            self._lanes[param.device]  # makes the lane that a step will use
        return self._twins[param].weight

    @torch.no_grad()
    def follow(self, params: Sequence[Tensor]) -> None:
        """Have each twin hold what its weight holds. Where the model has another dtype by now, or lies elsewhere, or
        parameters have left the optimizer, all twins will be made anew."""
        for lane in self._lanes.values():
            lane.wait()  # a twin must not change while it is copied
        pairs = [(it, part) for it, part in zip(params, parts_of(params), strict=True) if it in self._twins]
        if len(pairs) < len(self._twins) or not all(self._twins[it].fits(part) for it, part in pairs):
            self._forget()
            return
        for param, part in pairs:
            twin = self._twins[param]
            if twin.is_behind(param, part):
                twin.fetch(param, part)
                self._lanes[part.device]  # makes the lane that a step will use

    def begin(self) -> None:
        """Have later copies of weights wait for all that the current streams were given so far."""
        for lane in self._lanes.values():
            lane.follow()

    @torch.no_grad()
    def send(self, params: Iterable[Tensor]) -> None:
        """Start to copy the twins that have changed to these weights."""
        pairs = []
        changed = [param for param in params if param in self._twins and self._twins[param].is_ahead()]
        parts = parts_of(changed)
        for part, twin in zip(parts, map(self._twins.__getitem__, changed), strict=True):
            if twin.room is None:
                pairs.append((part, twin.part))
            else:
                pairs += (twin.room, twin.part), (part, twin.room)
        self._lanes.copy_all(pairs)
        torch.autograd.graph.increment_version([param for param in changed if is_sharded(param)])
        for param, part in zip(changed, parts, strict=True):
            self._twins[param].note(param, part)

    def end(self) -> None:
        """Have the current streams wait for the weights."""
        for lane in self._lanes.values():
            lane.be_followed()

    def send_all(self) -> None:
        """Copy each twin that has changed to its weight."""
        if any(twin.is_ahead() for twin in self._twins.values()):
            self.begin()
            try:
                self.send(list(self._twins))
            finally:
                self.end()
