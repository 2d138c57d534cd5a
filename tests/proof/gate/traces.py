"""The table of what each case's launches were counted to do, what of it is worse, and what is required of it."""

import json
import re
from collections.abc import Iterable, Iterator
from math import ceil, log2, prod
from pathlib import Path
from typing import NamedTuple

from tests.proof.gate.chips import CHIPS, REGISTERS, Chip
from tests.proof.gate.memory_bound_calls import CASES

PATH = Path(__file__).with_name("traces.json")
LANES = 32
ROUNDING = 1.03  # a case's last block is a little shorter than the counted one; a matrix's sums need 2 % more

LESS_IS_BETTER = ("registers", "shared", "instructions", "moved", "trips")
LESS_IS_BETTER += ("fp64_after_data", "fp64_after_exchange", "divergent_constants", "bank_conflicts")
MORE_IS_BETTER = ("wide",)


class Traced(NamedTuple):
    """A launch, and what one of its blocks was counted to do: a row of traces.json."""

    kernel: str
    grid: list[int]
    block: int
    registers: int
    shared: int
    counts: dict[str, int]  # of sass.counts

    @property
    def blocks(self) -> int:
        return prod(self.grid)

    @property
    def data(self) -> int:
        """Bytes that all blocks load and store, if each does as much as the counted one."""
        return self.blocks * (self.counts["loaded"] + self.counts["stored"])

    @property
    def in_flight(self) -> float:
        """Bytes that a thread has asked for when it waits."""
        return self.counts["loaded"] / max(self.counts["trips"], 1) / self.block

    def resident_blocks(self, chip: Chip) -> int:
        """Return how many blocks a multiprocessor holds. A warp's registers come in portions of 256, of a quarter of
        the file."""
        warps = ceil(self.block / LANES)
        of_warp = ceil(self.registers * LANES / 256) * 256
        by_registers = REGISTERS // 4 // of_warp * 4 // warps
        by_shared = chip.shared // (self.shared + 1024)  # each block has 1 KB beside what it asks for
        return min(by_registers, by_shared, chip.threads // self.block, chip.blocks)


Key = tuple[str, str]  # case, code
Rows = dict[Key, list[Traced]]


class Traces(NamedTuple):
    version: str  # of the compiler
    rows: Rows


class Table(NamedTuple):
    of_compiler: dict[str, Traces]
    shortfalls: list[str]  # names of the requirements that are known not to hold


def read() -> Table:
    content = json.loads(PATH.read_text())
    shortfalls: list[str] = content.pop("shortfalls")
    of_compiler = {
        compiler: Traces(
            it["version"],
            {
                (case, code): [Traced(**row) for row in rows]
                for case, codes in it["cases"].items()
                for code, rows in codes.items()
            },
        )
        for compiler, it in content.items()
    }
    return Table(of_compiler, shortfalls)


def update(counted: dict[str, Traces], missed: Iterable[str]) -> None:
    """Shortfalls are taken off the list where they are none any more. To add one is left to who knows why."""
    content: dict[str, object] = {"shortfalls": [name for name in read().shortfalls if name in missed]}
    for compiler, it in sorted(counted.items()):
        cases: dict[str, dict[str, object]] = {}
        for (case, code), rows in sorted(it.rows.items()):
            cases.setdefault(case, {})[code] = [row._asdict() for row in rows]
        content[compiler] = {"version": it.version, "cases": cases}
    text = json.dumps(content, indent=1)
    PATH.write_text(re.sub(r'{\s+"kernel"[^{}]*{[^{}]*}\s*}', lambda row: " ".join(row[0].split()), text) + "\n")


def regressions(got: Traces, wanted: Traces) -> Iterator[str]:
    """One line for each number that is worse, where one compiler has made both."""
    if got.version != wanted.version:
        return
    for (case, code), rows in sorted(got.rows.items()):
        before = wanted.rows.get((case, code))
        if before is None or [it.kernel for it in before] != [it.kernel for it in rows]:
            yield f"{case} on {code}: launches other kernels than the table has"
            continue
        for row, old in zip(rows, before, strict=True):
            new_numbers, old_numbers = ({**it._asdict(), **it.counts} for it in (row, old))
            for names, sign in ((LESS_IS_BETTER, 1), (MORE_IS_BETTER, -1)):
                for name in names:
                    if sign * new_numbers[name] > sign * old_numbers[name]:
                        worse = f"{name} {new_numbers[name]}, the table has {old_numbers[name]}"
                        yield f"{case} on {code}, {row.kernel}: {worse}"


class Requirement(NamedTuple):
    name: str  # as it is listed among the shortfalls
    holds: bool
    found: str


def missed(counted: dict[str, Traces], lines: Iterable[str] = ()) -> dict[str, str]:
    """What was found instead of each requirement that does not hold. ``lines`` say it of another table's."""
    found = {
        it.name: it.found
        for compiler, traces in counted.items()
        for (case, code), rows in traces.rows.items()
        for it in requirements(compiler, case, code, rows)
        if not it.holds
    }
    return found | dict.fromkeys(lines, "")


def judge(found: dict[str, str], shortfalls: list[str]) -> tuple[list[str], list[str]]:
    """A line for each requirement that is known not to hold, then for each that is not, and that holds after all."""
    known = [f"known shortfall: {name}: {text}" for name, text in found.items() if name in shortfalls]
    unknown = [f"{name}: {text}" for name, text in found.items() if name not in shortfalls]
    unknown += [f"{name}: listed as a shortfall, and is none" for name in shortfalls if name not in found]
    return [line.removesuffix(": ") for line in known], [line.removesuffix(": ") for line in unknown]


def requirements(compiler: str, case: str, code: str, rows: list[Traced]) -> Iterator[Requirement]:
    wanted, place = CASES[case], f"{compiler}, {case}, {code}"
    moved = sum(it.data for it in rows)
    found = _sum(rows, "fp64_after_data") * LANES * wanted.bytes / moved
    yield Requirement(f"{place}: fp64 in the loop", found <= wanted.most_fp64, f"{found:.2f} operations an element")
    for it in rows:
        warps = -(-it.block // LANES)
        most = int(log2(LANES)) + warps - 1 if wanted.most_fp64 else 0  # one sum over a warp, one over the warps' sums
        found = it.counts["fp64_after_exchange"] / warps
        yield Requirement(f"{place}: fp64 of the block", found <= most, f"{found:.1f} operations a thread")
    for name in ("divergent_constants", "bank_conflicts"):
        count = _sum(rows, name)
        yield Requirement(f"{place}: {name.replace('_', ' ')}", not count, str(count))
    of_each = moved / wanted.elements
    is_as_counted = wanted.bytes / ROUNDING <= of_each <= wanted.bytes * ROUNDING
    yield Requirement(f"{place}: bytes", is_as_counted, f"{of_each:.2f} an element, {wanted.bytes:.2f} were counted")
    for name, chip in CHIPS.items():
        if chip.code == code:
            yield Requirement(f"{compiler}, {case}, {name}: bytes in flight", *_in_flight(rows, chip))


def _in_flight(rows: list[Traced], chip: Chip) -> tuple[bool, str]:
    """Say whether the launch that moves most asks for as many bytes at a time as Little's law wants: the share of loads
    in what a multiprocessor moves in one latency."""
    it = max(rows, key=lambda row: row.data)
    found = it.in_flight * it.block * it.resident_blocks(chip)
    wanted = it.counts["loaded"] * it.blocks / it.data * chip.in_one_latency
    return found >= wanted, f"{found / 1e3:.0f} KB, Little's law wants {wanted / 1e3:.0f}"


def _sum(launches: Iterable[Traced], name: str) -> int:
    return sum(it.counts[name] * it.blocks for it in launches)
