"""What a run has found: for people, for pytest-benchmark's JSON and for the results' file."""

import json
from datetime import date
from pathlib import Path
from statistics import median
from typing import NamedTuple

import mpkernels
from benchmarks import machine
from benchmarks.pairs import Pair, Samples
from benchmarks.settings import Place, Setting

WIDE = 0.1
BUSY = 0.05

COLUMNS = "{:43} {:>9} {:>9} {:>7} {:>8}  {}"
HEADER = COLUMNS.format("", "ours us", "torch us", "GB/s", "of copy", "our time / torch's [95 % interval]")
NOTE = f"""\
wide: the interval spans more than {WIDE:.0%}. busy: threads waited for a core more than {BUSY:.0%} of the time.
Measure both again before you believe them; --benchmark-max-time=10 gives each pair ten times as long."""


class Row(NamedTuple):
    pair: Pair
    setting: Setting
    samples: Samples
    copy_speed: float  # of the machine, right after

    @property
    def speed(self) -> float:
        return self.pair.moved / median(self.samples.ours)

    @property
    def gflops(self) -> float:
        return self.pair.flops / median(self.samples.ours) / 1e9

    @property
    def kernel(self) -> str:
        return mpkernels.backends(self.pair.op, self.setting.place.device)[0]

    @property
    def doubts(self) -> list[str]:
        low, middle, high = self.samples.ratio()
        return ["wide"] * (high - low > WIDE * middle) + ["busy"] * (self.samples.waited > BUSY)

    def line(self, copy_speed: float) -> str:
        low, middle, high = self.samples.ratio()
        return COLUMNS.format(
            f"{self.pair.op} {self.pair.variant} {self.setting}".replace("  ", " "),
            f"{median(self.samples.ours) * 1e6:.1f}",
            f"{median(self.samples.theirs) * 1e6:.1f}",
            f"{self.gflops:.0f} GF" if self.pair.flops else f"{self.speed / 1e9:.1f}",
            "" if self.pair.flops else f"{self.speed / copy_speed:.0%}",
            "  ".join([f"{middle:.3f} [{low:.3f}, {high:.3f}]", *self.doubts]),
        )

    def extra_info(self) -> dict[str, object]:
        low, middle, high = self.samples.ratio()
        return {
            "device": machine.describe()["gpu" if self.setting.place.device == "cuda" else "cpu"],
            "threads": self.setting.place.threads,
            "dtype": self.setting.dtype,
            "kernel": self.kernel,
            "bytes moved": self.pair.moved,
            "GB/s": self.speed / 1e9,
            "GFLOP/s": self.gflops,
            "torch us": median(self.samples.theirs) * 1e6,
            "x torch": middle,
            "x torch interval": [low, high],
            "doubts": self.doubts,
        }

    def raw(self) -> dict[str, object]:
        return {
            "op": self.pair.op,
            "variant": self.pair.variant,
            "place": str(self.setting.place),
            "dtype": self.setting.dtype,
            "case": self.setting.case.name,
            "kernel": self.kernel,
            "bytes moved": self.pair.moved,
            "flops": self.pair.flops,
            "waited": round(self.samples.waited, 3),
            "ours us": _microseconds(self.samples.ours),
            "torch us": _microseconds(self.samples.theirs),
        }


def _microseconds(seconds: list[float]) -> list[float]:
    return [float(f"{value * 1e6:.4g}") for value in seconds]


def table(rows: list[Row]) -> str:
    copy_speeds = _copy_speeds(rows)
    lines = [row.line(copy_speeds[row.setting.place]) for row in rows]
    return "\n".join([HEADER, *lines] + [NOTE] * any(row.doubts for row in rows))


def _copy_speeds(rows: list[Row]) -> dict[Place, float]:
    """The best of each place, for other programs may have been at work beside any of them."""
    speeds: dict[Place, float] = {}
    for row in rows:
        speeds[row.setting.place] = max(row.copy_speed, speeds.get(row.setting.place, 0.0))
    return speeds


def write(path: Path, rows: list[Row]) -> None:
    """Raw samples only, a line a pair: medians and intervals are worked out by who reads them."""
    head = {
        "date": date.today().isoformat(),
        "machine": machine.describe(),
        "copy GB/s": {str(place): round(speed / 1e9, 1) for place, speed in _copy_speeds(rows).items()},
    }
    pairs = ",\n".join(json.dumps(row.raw(), separators=(",", ":")) for row in rows)
    path.write_text(f'{json.dumps(head, indent=1)[:-2]},\n "pairs": [\n{pairs}\n]}}\n')
