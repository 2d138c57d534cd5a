"""What a block's way through a kernel would cost on a chip: instructions, bytes, and how often it waits for memory."""

from collections import Counter
from typing import Any, NamedTuple

from tests.proof.sass.code import Code, Instruction
from tests.proof.sass.memory import LANES, Memory
from tests.proof.sass.registers import Access, Register
from tests.proof.sass.warp import Launch, Warp, run_block

LINE, SECTOR, BANKS = 128, 32, 32  # bytes of a cache line, of what memory is asked for at once; banks of 4 bytes
CONSTANT_LINE = 64
FEW_WARPS = 4  # a block of Triton's, whose warps exchange data

# Which unit does it. What is not listed is ALU's.
UNITS = {
    "fma": {"FFMA", "FMUL", "FADD", "IMAD", "FFMA2", "FMUL2", "FADD2", "HADD2", "HFMA2", "HMUL2"},
    "fp64": {"DADD", "DMUL", "DFMA", "DSETP", "DMNMX"},
    "special": {"MUFU", "F2F", "F2I", "I2F", "FRND", "POPC", "FLO", "BREV"},
    "memory": {"LDG", "STG", "LD", "ST", "LDS", "LDSM", "STS", "ATOMG", "ATOM", "RED", "REDG", "SHFL", "LDC"},
    "control": {"BRA", "BRX", "CALL", "RET", "BSSY", "BSYNC", "BREAK", "EXIT", "NOP", "BAR", "WARPSYNC", "MEMBAR"},
}
UNIT_OF = {name: unit for unit, names in UNITS.items() for name in names}

# Cycles until a result can be used, to within a few, as microbenchmarks have them (Luo et al., arXiv:2402.13499;
# Abdelkhalik et al., arXiv:2208.11174). They matter where a block has few warps, or nothing is asked of memory yet.
CYCLES = {"fma": 4, "alu": 5, "fp64": 12, "special": 20, "memory": 30, "control": 2}


class Time(NamedTuple):
    """A trip is a wait for what was asked for after the last wait: one latency, however much was asked."""

    trips: int = 0  # to memory, for data
    short_trips: int = 0  # to the L2 cache, for all else
    cycles: int = 0  # with no other warp beside it, and memory that answers at once

    @property
    def nominal(self) -> int:
        """In cycles, to see which of two warps comes later."""
        return 1400 * self.trips + 500 * self.short_trips + self.cycles


TOTALS = {
    "instructions": "of all warps",
    "loaded": "bytes of data, that is of what differs from lane to lane",
    "stored": "likewise",
    "moved": "bytes of the sectors that these touch",
    "wide": "bytes of data in accesses of 16 bytes a lane",
    "wavefronts": "turns that data and shared memory take in the load and store unit",
    "fp64_after_data": "fp64 operations after data was first asked for, with what a lane has itself",
    "fp64_after_exchange": "likewise, after lanes have begun to exchange what they have",
    "divergent_constants": "reads of constant memory at more than one address",
    "bank_conflicts": "turns that shared memory takes beyond the least",
}


def count(code: Code, launch: Launch) -> tuple[dict[str, Any], Memory]:
    """What the second block costs, for the first may do what is done once for all; and what its warps have stored. Of
    many warps two are run: the first may do what is done once for the block, the others are taken to be alike."""
    warps = -(-launch.block // LANES)
    costs = [WarpCost() for _ in range(warps if warps <= FEW_WARPS else 2)]

    def meet() -> None:
        latest = max((it.time for it in costs), key=lambda it: it.nominal)
        for each in costs:
            each.go_on_at(latest)

    block = tuple(min(1, blocks - 1) for blocks in launch.grid)
    memory = run_block(code, launch, block, dict(enumerate(costs)), meet)
    last = costs[-1]
    all_warps = costs + [last] * (warps - len(costs))
    counts = {name: sum(it.totals[name] for it in all_warps) for name in (*TOTALS, "alu", *UNITS)}
    counts |= last.time._asdict()
    counts |= {f"head_{name}": value for name, value in (last.head or last.time)._asdict().items()}
    return {"registers": code.registers, "shared": code.shared + launch.dynamic_shared, "counts": counts}, memory


class Wait(NamedTuple):
    ready: int  # in cycles, where memory answers at once
    kind: str = ""  # a name of Time's; "" where nothing is asked of memory
    at: int = 0  # the instruction that asked


class WarpCost:
    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()
        self.time = Time()
        self.head: Time | None = None
        self._has_exchanged = False
        self._pending: dict[Register, Wait] = {}
        self._last_wait = {"trips": -1, "short_trips": -1}
        self._near: dict[int, int] = {}  # sectors that L1 has: which instruction asked for it
        self._constant_lines: set[int] = set()
        self._sectors: dict[bool, set[int]] = {True: set(), False: set()}  # read, written

    @property
    def _now(self) -> int:
        """The number of this instruction."""
        return self.totals["instructions"]

    def go_on_at(self, latest: Time) -> None:
        """Another warp has come later to where the block meets."""
        if latest.trips > self.time.trips:
            self._last_wait = dict.fromkeys(self._last_wait, self._now)
        later = latest.cycles - self.time.cycles
        self._pending = {register: wait._replace(ready=wait.ready + later) for register, wait in self._pending.items()}
        self.time = latest

    def __call__(self, instruction: Instruction, warp: Warp) -> None:
        unit = UNIT_OF.get(instruction.name, "alu")
        self.totals["instructions"] += 1
        self.totals[unit] += 1
        self.time = self.time._replace(cycles=self.time.cycles + 1)
        for register in warp.step.reads:
            self._wait_for(register)
        kind, at = "", self._now
        for access in warp.step.accesses:
            if access.space == "global":
                kind, at = self._count_global(access, "STRONG" in instruction.modifiers)
            else:
                self._count_on_chip(access)
        if self.head and (unit == "fp64" or (unit == "special" and "F64" in instruction.modifiers)):
            self.totals["fp64_after_exchange" if self._has_exchanged else "fp64_after_data"] += 1
        self._has_exchanged |= instruction.name == "SHFL" and self.head is not None
        for register in warp.step.writes:
            self._pending[register] = Wait(self.time.cycles + CYCLES[unit], kind, at)

    def _wait_for(self, register: Register) -> None:
        wait = self._pending.pop(register, None)
        if wait is None:
            return
        self.time = self.time._replace(cycles=max(self.time.cycles, wait.ready))
        if wait.kind and wait.at > self._last_wait[wait.kind]:
            self.time = self.time._replace(**{wait.kind: getattr(self.time, wait.kind) + 1})
            self._last_wait["short_trips"] = self._now  # it has come by then, too
            if wait.kind == "trips":
                self._last_wait["trips"] = self._now

    def _count_on_chip(self, access: Access) -> None:
        if access.space == "constant":
            self._count_constant({*access.addresses})
        else:
            turns, least = _turns(access)
            self.totals["wavefronts"] += turns
            self.totals["bank_conflicts"] += turns - least

    def _count_constant(self, addresses: set[int]) -> None:
        """The lanes of one address after those of another, each line fetched when its turn has come. What all lanes
        read is fetched once a launch, which is not counted."""
        if len(addresses) == 1:
            return
        self.totals["divergent_constants"] += 1
        lines = {at // CONSTANT_LINE for at in addresses} - self._constant_lines
        self._constant_lines |= lines
        time = self.time
        self.time = time._replace(cycles=time.cycles + len(addresses), short_trips=time.short_trips + len(lines))

    def _count_global(self, access: Access, is_past_l1: bool) -> tuple[str, int]:
        """Returns which kind of trip it is, and which instruction began it: a sector that was asked for comes once."""
        touched = {byte // SECTOR for at in access.addresses for byte in (at, at + access.width - 1)}
        if len({*access.addresses}) < LANES:
            known = {} if is_past_l1 else self._near
            asked = max(known.get(sector, self._now) for sector in touched)
            self._near |= dict.fromkeys(touched - self._near.keys(), self._now)
            return "short_trips", asked
        size = access.width * len(access.addresses)
        self.totals["loaded" if access.is_load else "stored"] += size
        self.totals["wide"] += size if access.width == 16 else 0
        sectors = self._sectors[access.is_load]
        self.totals["moved"] += SECTOR * len(touched - sectors)
        sectors |= touched
        lowest = min(access.addresses)  # begins a line on a GPU, whose tensors are further aligned than a CPU's
        self.totals["wavefronts"] += len({(at - lowest) // LINE for at in access.addresses})
        self.head = self.head or self.time
        return "trips", self._now


def _turns(access: Access) -> tuple[int, int]:
    """How often the banks are asked, and how often they would be without a conflict. A quarter of the lanes is served
    at once if each wants 16 bytes, half of them if 8."""
    lanes = LANES * 4 // max(access.width, 4)
    turns = groups = 0
    for begin in range(0, len(access.addresses), lanes):
        words = {(at + i) // 4 for at in access.addresses[begin : begin + lanes] for i in range(0, access.width, 4)}
        turns += max(Counter(word % BANKS for word in words).values())
        groups += 1
    return turns, groups
