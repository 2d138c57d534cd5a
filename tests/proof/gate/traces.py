"""The table of what each case's launches were counted to do, what of it is worse, and what is required of it."""

import json
import re
from collections.abc import Iterable, Iterator
from math import log2
from pathlib import Path
from typing import NamedTuple

from mpkernels.bench.roofline import LAUNCH
from tests.proof.gate.cases import CASES
from tests.proof.gate.chips import CHIPS
from tests.proof.gate.prediction import LANES, Traced, predict

PATH = Path(__file__).with_name("traces.json")
MUST_BE_AS_FAST_AS_A_COPY = ("A100", "H100", "H200")
ROUNDING = 1.03  # a case's last block is a little shorter than the counted one; a matrix's sums need 2 % more

LESS_IS_BETTER = ("registers", "shared", "instructions", "moved", "trips", "short_trips", "head_cycles")
LESS_IS_BETTER += ("fp64_after_data", "fp64_after_exchange", "divergent_constants", "bank_conflicts")
MORE_IS_BETTER = ("wide",)

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
    for chip in MUST_BE_AS_FAST_AS_A_COPY:
        if wanted.least_of_copy and CHIPS[chip].code == code:
            it = of_case(case, rows, chip)
            name = f"{compiler}, {case}, {chip}: {wanted.least_of_copy:.0%} of a copy"
            text = f"{it.of_copy:.0%}, {it.seconds * 1e6:.0f} us, limited by {it.limit}"
            yield Requirement(name, it.of_copy >= wanted.least_of_copy, text)


def _sum(launches: Iterable[Traced], name: str) -> int:
    return sum(it.counts[name] * it.blocks for it in launches)


class OfCase(NamedTuple):
    seconds: float
    of_copy: float  # counted bytes over the time, as a share of what a copy reaches
    limit: str


def of_case(case: str, launches: list[Traced], chip: str) -> OfCase:
    """Its launches one after the other, the limit that of the longest."""
    predictions = [predict(it, CHIPS[chip]) for it in launches]
    longest = max(predictions, key=lambda it: it.seconds)
    seconds = sum(max(it.seconds, LAUNCH) for it in predictions)
    copied = CASES[case].bytes * CASES[case].elements / CHIPS[chip].bandwidth
    return OfCase(seconds, copied / seconds, longest.limit)
