"""Counts what a block does on its way through a kernel: instructions, bytes, and how often it waits for data."""

from collections import Counter
from typing import Any

from tests.proof.sass.code import Code, Instruction
from tests.proof.sass.memory import LANES, Memory
from tests.proof.sass.register_file import Access, Register
from tests.proof.sass.warp import Launch, Warp, run_block

SECTOR, BANKS = 32, 32  # bytes that memory is asked for at once; banks of 4 bytes
FEW_WARPS = 4  # a block of Triton's, whose warps exchange data
IN_FP64 = {"DADD", "DMUL", "DFMA", "DSETP", "DMNMX"}
FROM_OR_TO_FP64 = {"MUFU", "F2F", "F2I", "I2F", "FRND"}  # if a modifier says F64

TOTALS = {
    "instructions": "of all warps",
    "loaded": "bytes of data, that is of what differs from lane to lane",
    "stored": "likewise",
    "moved": "bytes of the sectors that these touch",
    "wide": "bytes of data in accesses of 16 bytes a lane",
    "fp64_after_data": "fp64 operations after data was first asked for, with what a lane has itself",
    "fp64_after_exchange": "likewise, after lanes have begun to exchange what they have",
    "divergent_constants": "reads of constant memory at more than one address",
    "bank_conflicts": "turns that shared memory takes beyond the least",
}
TRIPS = "trips"  # waits for data that was asked for after the last wait, however much was asked: of one warp


def count(code: Code, launch: Launch) -> tuple[dict[str, Any], Memory]:
    """Return what the second block does, for the first may do what is done once for all, and what its warps have
    stored. If there are many warps, two are run: the first may do what is done once for the block, the others are taken
    to be alike."""
    warps = -(-launch.block // LANES)
    counted = [WarpCounts() for _ in range(warps if warps <= FEW_WARPS else 2)]
    block = tuple(min(1, blocks - 1) for blocks in launch.grid)
    memory = run_block(code, launch, block, dict(enumerate(counted)))
    last = counted[-1]
    all_warps = counted + [last] * (warps - len(counted))
    counts = {name: sum(it.totals[name] for it in all_warps) for name in TOTALS} | {TRIPS: last.totals[TRIPS]}
    return {"registers": code.registers, "shared": code.shared, "counts": counts}, memory


class WarpCounts:
    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()
        self._has_asked = self._has_exchanged = False
        self._asked_by: dict[Register, int] = {}  # the number of the instruction that asked for what will be there
        self._last_wait = -1  # likewise
        self._sectors: dict[bool, set[int]] = {True: set(), False: set()}  # read, written

    def __call__(self, instruction: Instruction, warp: Warp) -> None:
        self.totals["instructions"] += 1
        now = self.totals["instructions"]
        for register in warp.step.reads:
            if self._asked_by.pop(register, -1) > self._last_wait:
                self.totals[TRIPS] += 1
                self._last_wait = now
        asks = False
        for access in warp.step.accesses:
            if access.space == "global":
                asks |= self._count_data(access)
            elif access.space == "shared":
                self.totals["bank_conflicts"] += _conflicts(access)
            else:
                self.totals["divergent_constants"] += len({*access.addresses}) > 1
        if self._has_asked and _is_fp64(instruction):
            self.totals["fp64_after_exchange" if self._has_exchanged else "fp64_after_data"] += 1
        self._has_exchanged |= instruction.name == "SHFL" and self._has_asked
        for register in warp.step.writes:
            self._asked_by.pop(register, None)
            if asks:
                self._asked_by[register] = now

    def _count_data(self, access: Access) -> bool:
        """Return whether the access is to data. What lanes share is the same for many blocks, and lies in a cache."""
        if len({*access.addresses}) < LANES:
            return False
        size = access.width * LANES
        self.totals["loaded" if access.is_load else "stored"] += size
        self.totals["wide"] += size if access.width == 16 else 0
        touched = {byte // SECTOR for at in access.addresses for byte in (at, at + access.width - 1)}
        sectors = self._sectors[access.is_load]
        self.totals["moved"] += SECTOR * len(touched - sectors)
        sectors |= touched
        self._has_asked = True
        return True


def _is_fp64(it: Instruction) -> bool:
    return it.name in IN_FP64 or (it.name in FROM_OR_TO_FP64 and "F64" in it.modifiers)


def _conflicts(access: Access) -> int:
    """Return how often the banks are asked beyond the least. A quarter of the lanes is served at once if each wants 16
    bytes, half of them if 8."""
    lanes, turns = LANES * 4 // max(access.width, 4), 0
    for begin in range(0, len(access.addresses), lanes):
        words = {(at + i) // 4 for at in access.addresses[begin : begin + lanes] for i in range(0, access.width, 4)}
        turns += max(Counter(word % BANKS for word in words).values()) - 1
    return turns
