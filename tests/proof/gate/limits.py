"""The table of what each kernel may cost on each chip, and what in a measurement is worse."""

import json
import re
from collections.abc import Container, Iterator
from pathlib import Path
from typing import NamedTuple

PATH = Path(__file__).with_name("table.json")

# Instructions that are counted in a kernel's machine code, by their names in the table. A kernel may not lose these.
KEPT = {
    "load128": r"LDG\S*\.(128|256)",
    "store128": r"STG\S*\.(128|256)",
    "HMMA": "HMMA",
    "HGMMA": "HGMMA",
    "UTCMMA": "UTC[A-Z]*MMA",
    "UTMALDG": "UTMALDG",
    "UTMASTG": "UTMASTG",
}
# A kernel may not get more of these. An fma is a product and a sum that a compiler has contracted, or part of a
# division.
BOUNDED = {
    "loads": "LDG",
    "stores": "STG",
    "atomics": r"ATOM|RED\b",
    "barriers": "BAR",
    "fma": "FFMA",
    "fp64": r"DADD|DMUL|DFMA|DSETP|DMNMX|(MUFU|F2F|F2I|I2F|FRND)\S*F64",
}
SHARED_LIMIT = {  # bytes for one block
    "sm_75": 65_536, "sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448, "sm_120": 101_376,
}  # fmt: skip

Numbers = dict[str, float]
Kernels = dict[tuple[str, str], Numbers]  # (kernel, chip) -> numbers


class Section(NamedTuple):
    """The kernels of one compiler, or some of their loops."""

    version: str
    kernels: Kernels


def read() -> dict[str, Section]:
    return {
        compiler: Section(
            section["version"],
            {(kernel, chip): it for kernel, chips in section["kernels"].items() for chip, it in chips.items()},
        )
        for compiler, section in json.loads(PATH.read_text()).items()
    }


def of_chips(section: Section, chips: Container[str]) -> Section:
    return section._replace(
        kernels={(kernel, chip): it for (kernel, chip), it in section.kernels.items() if chip in chips}
    )


def write(sections: dict[str, Section]) -> None:
    content: dict[str, dict[str, object]] = {}
    for compiler, section in sorted(sections.items()):
        chips: dict[str, dict[str, Numbers]] = {}
        for (kernel, chip), numbers in sorted(section.kernels.items()):
            chips.setdefault(kernel, {})[chip] = numbers
        content[compiler] = {"version": section.version, "kernels": chips}
    text = json.dumps(content, indent=2)
    PATH.write_text(re.sub(r"{[^{}]*}", lambda numbers: " ".join(numbers[0].split()), text) + "\n")


def regressions(measured: Section, table: Section) -> Iterator[str]:
    """Yield a line for each way in which a kernel is worse. Numbers are comparable only if one compiler made them."""
    for kernel, chip in sorted(measured.kernels | table.kernels):
        got, wanted = measured.kernels.get((kernel, chip)), table.kernels.get((kernel, chip))
        if got is None:
            whys = ["in the table, but no longer compiled"]
        elif wanted is None:
            whys = [*_beyond_limits(got, chip), "not in the table"]
        else:
            whys = [*_beyond_limits(got, chip), *_worse(got, wanted, measured.version == table.version)]
        for why in whys:
            yield f"{kernel} on {chip}: {why}"


def _beyond_limits(got: Numbers, chip: str) -> Iterator[str]:
    if got.get("spills"):
        yield f"{got['spills']} spills"
    if got.get("unguarded"):
        yield f"{got['unguarded']} unguarded buffers, which are filled while other warps may read them"
    if got.get("shared", 0) > SHARED_LIMIT[chip]:
        yield f"{got['shared']} bytes of shared memory, the chip has {SHARED_LIMIT[chip]}"


def _worse(got: Numbers, wanted: Numbers, comparable: bool) -> Iterator[str]:
    for name in (*KEPT, "groups_left"):
        least = wanted.get(name, 0) if comparable else min(wanted.get(name, 0), 1)
        if got.get(name, 0) < least:
            yield f"{name} {got.get(name, 0)}, the table has {wanted[name]}"
    for name in ("registers", "stack", "shared", "instructions", *BOUNDED):
        if comparable and got.get(name, 0) > wanted.get(name, 0):
            yield f"{name} {got[name]}, the table has {wanted.get(name, 0)}"
