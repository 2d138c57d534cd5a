"""offload="stream": states visit the GPU."""

from collections.abc import Sequence
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
        self._lent: tuple[Tensor, Tensor, object] | None = None  # a weight, its home and the version of that

    def __del__(self) -> None:
        self.wait()

    def wait(self) -> None:
        for slots in self._slots.values():
            slots.wait()

    @torch.no_grad()
    def home(self, param: Tensor) -> Tensor:
        if not param.is_cuda:
            return param
        self.settle()
        part = part_of(param.detach())
        there = torch.empty_like(part, device="cpu").copy_(part)
        self._lent = part, there, version_of(there)
        return placed_as(param, there)  # type: ignore[no-any-return]

    @torch.no_grad()
    def settle(self) -> None:
        if self._lent is not None:
            (part, there, version), self._lent = self._lent, None
            if version_of(there) != version:
                part.copy_(there)

    def is_ready(self, optimizer: Any, param: Tensor, state: State, group: Group) -> bool:
        block = self._blocks.get(param)
        return block is not None and block.made_for == _options(optimizer, param, group) and _is_in(block, state)

    def placed(self, param: Tensor, state: State) -> tuple[Tensor, State]:
        self.wait()
        return super().placed(param, state)

    def plans(
        self, optimizer: Any, params: Sequence[Tensor], rows: Sequence[Any], places: list[int], grads: list[Any]
    ) -> list[Plan]:
        self.settle()
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
        block, op = self._blocks.get(param), optimizer._rule.ops.rule
        if block is None or not _is_in(block, state):
            parts, shape = parts_in(state), part_of(param).shape
            offsets, size = {}, 0
            for key in (*masters.KEYS.values(), *op.states, "scales", "step"):
                if key not in parts:
                    continue
                if key not in ("scales", "step") and parts[key].shape != shape:  # kernels see slots, never these
                    got = tuple(parts[key].shape)
                    raise ValueError(f"{op.op}: {key} must have the parameter's shape {tuple(shape)}, got {got}")
                offsets[key] = size
                size += -(-parts[key].numel() * parts[key].itemsize // LINE) * LINE
            memory = self._pinned.take(size)
            moved = {key: placed_as(state[key], _own(memory, at, parts[key])) for key, at in offsets.items()}
            if hasattr(state.get("remainder"), "made_for"):
                masters.mark(moved, state["remainder"].made_for)  # type: ignore[attr-defined]
            state.update(moved)
            block = Block(memory, offsets, moved, None)
        self._blocks[param] = block._replace(made_for=_options(optimizer, param, group))


def _is_in(block: Block, state: State) -> bool:
    return all(state.get(key) is it for key, it in block.state.items())


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
    return torch.empty(0, dtype=state.dtype).set_(storage, 0, state.shape, strides).copy_(state)
