"""offload="stream": states visit the GPU."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mpkernels._shared.parameters import by_device
from mpkernels._torch_private.tensors import version_of
from mpkernels.distributed.parts import part_of, parts_in, placed_as
from mpkernels.optim import masters
from mpkernels.optim.offload.copies import Pinned
from mpkernels.optim.offload.offload import Offload, State
from mpkernels.optim.offload.slots import LINE, Block, Slots
from mpkernels.optim.offload.streamed_plan import StreamedPlan
from mpkernels.optim.plan import Group, Plan


class Streaming(Offload):
    """States lie in blocks of pinned memory, parameter after parameter. Homes are copies of weights for a moment."""

    _option, _why = "'stream'", "its copies have streams of their own"

    def __init__(self) -> None:
        self._pinned, self._blocks = Pinned(), dict[Tensor, Block]()
        self._slots: dict[torch.device, Slots] = {}

    def __del__(self) -> None:
        self.wait()

    def wait(self) -> None:
        for slots in self._slots.values():
            slots.wait()

    @contextmanager
    def home(self, param: Tensor) -> Iterator[Tensor]:
        if not param.is_cuda:
            yield param
            return
        self.wait()  # states are about to be read, too
        part = part_of(param.detach())
        there = torch.empty_like(part, device="cpu").copy_(part)
        version = version_of(there)
        yield placed_as(param, there)
        if version_of(there) != version:
            with torch.no_grad():
                part.copy_(there)

    def is_ready(self, optimizer: Any, param: Tensor, state: State, group: Group) -> bool:
        block = self._blocks.get(param)
        return block is not None and block.made_for == _options(optimizer, param, group) and block.holds(state)

    def plans(
        self, optimizer: Any, params: Sequence[Tensor], rows: Sequence[Any], places: list[int], grads: list[Any]
    ) -> list[Plan]:
        self._blocks = {param: self._blocks[param] for param in params if param in self._blocks}
        found, kept = [], (optimizer._ledger, optimizer._agreement.parts)
        for device, there in by_device((params[i] for i in places), places).items():
            if device.type != "cuda":
                found.append(Plan(optimizer._rule, rows, there, *kept))
                continue
            for i in there:
                self._keep(optimizer, params[i], *rows[i][::2])
            slots = self._slots.get(device) or self._slots.setdefault(device, Slots(device))
            found.append(StreamedPlan(optimizer._rule, rows, there, *kept, self._blocks, slots))
        return found

    def _keep(self, optimizer: Any, param: Tensor, group: Group, state: State) -> None:
        """Move a parameter's states to pinned memory, unless they are there. ``state`` changes when all have moved."""
        block, op, parts = self._blocks.get(param), optimizer._rule.ops.rule, parts_in(state)
        keys = [key for key in (*masters.KEYS.values(), *op.states, "scales", "step") if key in state]
        shape = tuple(part_of(param).shape)
        for key in keys:
            got = tuple(parts[key].shape)
            if got != shape and key not in ("scales", "step"):  # kernels see slots, never these
                raise ValueError(f"{op.op}: {key} must have the parameter's shape {shape}, got {got}")
        if block is None or keys != [*block.offsets] or not block.holds(state):
            offsets, size = {}, 0
            for key in keys:
                offsets[key] = size
                size += -(-parts[key].numel() * parts[key].itemsize // LINE) * LINE
            memory = self._pinned.take(size)
            moved = {key: placed_as(state[key], _own(memory, at, parts[key])) for key, at in offsets.items()}
            if hasattr(state.get("remainder"), "made_for"):
                masters.mark(moved, state["remainder"].made_for)  # type: ignore[attr-defined]
            state.update(moved)
            block = Block(memory, offsets, moved, None)
        self._blocks[param] = block._replace(made_for=_options(optimizer, param, group))


def _options(optimizer: Any, param: Tensor, group: Group) -> Any:
    """Return what decides which states a parameter has."""
    keys = tuple(optimizer._rule.keys(group))
    return keys, group["master"], group["state_dtype"], param.dtype, param.shape, param.device


def _own(memory: Tensor, at: int, state: Tensor) -> Tensor:
    """Return a copy of the state in this memory, with a storage of its own: torch.save refuses one storage with several
    dtypes, and pickle would save all of it with each tensor."""
    begin = memory.storage_offset() + at
    storage = memory.untyped_storage()[begin : begin + state.numel() * state.itemsize]
    strides = torch.empty_like(state, device="meta").stride()
    return torch.empty(0, dtype=state.dtype, device="cpu").set_(storage, 0, state.shape, strides).copy_(state)
