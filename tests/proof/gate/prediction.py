"""How long a launch takes on a chip, from what one of its warps was counted to do, and what that time is spent on."""

from math import ceil, prod
from typing import NamedTuple

from tests.proof.gate.chips import ISSUED, LATENCY, REGISTERS, SHORT_LATENCY, Chip

LANES = 32


class Traced(NamedTuple):
    """A launch, and what one of its blocks was counted to do: a row of traces.json."""

    kernel: str
    grid: list[int]
    block: int
    registers: int
    shared: int
    counts: dict[str, int]  # of sass.counts: totals, time, and the time of the head, whose names begin with head_

    @property
    def blocks(self) -> int:
        return prod(self.grid)

    @property
    def data(self) -> int:
        """Bytes that all blocks load and store, if each does as much as the counted one."""
        return self.blocks * (self.counts["loaded"] + self.counts["stored"])

    @property
    def in_flight(self) -> float:
        """Bytes that a thread has asked for, when it waits."""
        return self.counts["loaded"] / max(self.counts["trips"], 1) / self.block


class Prediction(NamedTuple):
    seconds: float
    limit: str  # what the time is spent on
    spent: dict[str, float]  # seconds that each resource alone would take
    of_copy: float  # bandwidth, of what a copy reaches
    in_flight: float  # bytes asked for by all threads of a multiprocessor
    needed: float  # by Little's law: the share of loads in what a multiprocessor moves in one latency


def resident_blocks(it: Traced, chip: Chip) -> int:
    """How many blocks a multiprocessor holds. A warp's registers come in portions of 256, of a quarter of the file."""
    warps = ceil(it.block / LANES)
    of_warp = ceil(it.registers * LANES / 256) * 256
    by_registers = REGISTERS // 4 // of_warp * 4 // warps
    by_shared = chip.shared // (it.shared + 1024)  # each block has 1 KB beside its own
    return min(by_registers, by_shared, chip.threads // it.block, chip.blocks)


def predict(it: Traced, chip: Chip) -> Prediction:
    counts, resident = it.counts, resident_blocks(it, chip)
    lanes_of_chip = chip.multiprocessors * chip.clock / LANES
    waves = ceil(it.blocks / (resident * chip.multiprocessors))
    spent = {
        "memory bandwidth": it.blocks * counts["moved"] / chip.bandwidth,
        "latency": waves * _seconds(counts, "", chip),
        "issue slots": it.blocks * counts["instructions"] / (lanes_of_chip * ISSUED),
    }
    for unit, lanes in chip.lanes.items():
        turns = max(counts["wavefronts"], counts["memory"]) if unit == "memory" else counts[unit]
        spent[f"{unit} unit"] = it.blocks * turns / (lanes_of_chip * lanes)
    limit = max(spent, key=lambda name: spent[name])
    seconds = spent[limit] + (_seconds(counts, "head_", chip) if limit != "latency" else 0)  # nothing moves before
    return Prediction(
        seconds=seconds,
        limit=limit,
        spent=spent,
        of_copy=it.data / chip.bandwidth / seconds,
        in_flight=it.in_flight * it.block * resident,
        needed=counts["loaded"] / max(counts["loaded"] + counts["stored"], 1) * in_one_latency(chip),
    )


def in_one_latency(chip: Chip) -> float:
    """Bytes that a multiprocessor's share of the bandwidth moves while a load is on its way."""
    return chip.bandwidth * LATENCY / chip.multiprocessors


def _seconds(counts: dict[str, int], part: str, chip: Chip) -> float:
    """A block's time, or with "head_" that of its head."""
    waits = counts[f"{part}trips"] * LATENCY + counts[f"{part}short_trips"] * SHORT_LATENCY
    return waits + counts[f"{part}cycles"] / chip.clock
