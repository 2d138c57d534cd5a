"""A warp: registers, predicates, and lanes that part at a branch and meet again."""

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import numpy as np

from tests.proof.sass.code import Code, Instruction, Operand
from tests.proof.sass.memory import LANES, Constants, Lanes, Memory, Shared
from tests.proof.sass.register_file import Access, Registers, Step


class Launch(NamedTuple):
    parameters: bytes
    grid: tuple[int, ...]  # in blocks
    block: int  # in threads


class Watcher(Protocol):
    def __call__(self, instruction: Instruction, warp: "Warp") -> None: ...


Meaning = Callable[["Warp", Instruction], None]
MEANINGS: dict[str, Meaning] = {}


def meaning(*names: str) -> Callable[[Meaning], Meaning]:
    def register(function: Meaning) -> Meaning:
        MEANINGS.update(dict.fromkeys(names, function))
        return function

    return register


class Warp(Registers):
    def __init__(
        self, code: Code, launch: Launch, block: tuple[int, ...], warp: int, memory: Memory, shared: Shared
    ) -> None:
        super().__init__(
            Constants(code.chip, code.parameters_at, launch.parameters, launch.grid, launch.block, code.constants)
        )
        self.code, self.launch, self.block, self.number = code, launch, block, warp
        self.memory, self.shared = memory, shared
        self.at = np.zeros(LANES, np.int64)  # each lane's next instruction
        self.alive = np.arange(LANES) + warp * LANES < launch.block
        self.waits_at = np.full(LANES, -1)  # the barrier
        self.meets: dict[int, Lanes] = {}  # barrier -> its lanes
        self.meetings = 0  # of the block, so far
        self.active = self.alive

    def run(self, watch: Watcher, most: int = 200_000) -> Iterator[None]:
        """The lanes that are furthest back go on, until they have caught up or wait for others. Yields where the block
        meets."""
        for _ in range(most):
            going = self.alive & (self.waits_at < 0)
            if not going.any():
                if self.alive.any():
                    raise RuntimeError(f"lanes wait for ever at {sorted(set(self.waits_at[self.alive]))}")
                return
            here = int(self.at[going].min())
            instruction = self.code.at(here)
            self._do(instruction, going & (self.at == here), watch)
            if instruction.name == "BAR":
                yield
        raise RuntimeError(f"not done after {most} instructions")

    def _do(self, instruction: Instruction, lanes: Lanes, watch: Watcher) -> None:
        self.step = Step()
        self.active = lanes
        self.active = lanes & self.predicate(instruction.guard)
        self.at[lanes] += 16
        if self.active.any():
            do = MEANINGS.get(instruction.name)
            if do is None:
                raise NotImplementedError(f"no meaning for {instruction.text}")
            with np.errstate(all="ignore"):
                do(self, instruction)
        watch(instruction, self)

    def load(self, space: str, operand: Operand, size: int) -> Lanes:
        """Read a row of bytes for each lane; lanes that take no part get zeros."""
        memory = self.memory if space == "global" else self.shared
        at, rows = self.addresses(operand), np.zeros((LANES, size), np.uint8)
        asked = at[self.active]
        first, last = int(asked.min()), int(asked.max())
        if last - first <= 2 * LANES * size:  # neighbours come together
            near = np.frombuffer(memory.read(first, last - first + size), np.uint8)
            rows[self.active] = near[(asked - first)[:, None] + np.arange(size)]
        else:
            for lane in np.flatnonzero(self.active):
                rows[lane] = np.frombuffer(memory.read(int(at[lane]), size), np.uint8)
        self.step.accesses.append(Access(space, True, size, asked.tolist()))
        return rows

    def store(self, space: str, operand: Operand, rows: Lanes) -> None:
        memory = self.memory if space == "global" else self.shared
        at = self.addresses(operand)
        for lane in np.flatnonzero(self.active):
            memory.write(int(at[lane]), rows[lane].tobytes())
        self.step.accesses.append(Access(space, False, rows.shape[1], at[self.active].tolist()))


def run_block(code: Code, launch: Launch, block: tuple[int, ...], warps: dict[int, Watcher]) -> Memory:
    """Some of a block's warps take turns: each goes on to where the block meets."""
    memory, shared = Memory(), Shared()
    going = [Warp(code, launch, block, number, memory, shared).run(watch) for number, watch in warps.items()]
    while going:
        going = [each for each in going if next(each, ENDED) is not ENDED]
    return memory


ENDED = object()
