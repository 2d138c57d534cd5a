"""What a run has found, measured now or read from a file. Raw samples only: medians and intervals are worked out by
whoever reads them."""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from mpkernels.bench import machine
from mpkernels.bench.counting import Counts
from mpkernels.bench.pairs import FEWEST_SAMPLES, Interval, Samples


@dataclass(frozen=True)
class Result:
    op: str
    variant: str
    place: str
    dtype: str
    case: str
    kernel: str
    moved: int  # bytes
    waited: float
    ours_us: list[float]
    torch_us: list[float]
    baseline: str = "torch"
    flops: int = 0
    counts: dict[str, Counts] = field(default_factory=dict)  # of "ours" and "theirs"

    @property
    def name(self) -> str:
        words = (self.op, self.variant, self.place, self.dtype, self.case, "vs", self.baseline)
        return " ".join(filter(None, words))

    @property
    def ratio(self) -> Interval:
        """x torch: above 1, ours is faster."""
        return self._samples.ratio()

    @property
    def _samples(self) -> Samples:
        return Samples(self.ours_us, self.torch_us, self.waited)

    @property
    def bytes_a_second(self) -> float:
        return self.moved / median(self.ours_us) * 1e6

    @property
    def flops_a_second(self) -> float:
        return self.flops / median(self.ours_us) * 1e6

    @property
    def doubts(self) -> list[str]:
        return self._samples.doubts()

    def and_more(self, later: "Result") -> "Result":
        """With the samples of another turn."""
        here, there = len(self.ours_us), len(later.ours_us)
        return replace(
            self,
            ours_us=self.ours_us + later.ours_us,
            torch_us=self.torch_us + later.torch_us,
            waited=round((self.waited * here + later.waited * there) / (here + there), 3),
        )


@dataclass
class Run:
    """All results of one machine on one day."""

    date: str
    machine: machine.Description
    copy_speeds: dict[str, float] = field(default_factory=dict)  # bytes a second, by place
    gemm_speeds: dict[str, float] = field(default_factory=dict)  # flops a second, by place and dtype
    skipped: dict[str, str] = field(default_factory=dict)  # name: reason
    results: list[Result] = field(default_factory=list)

    @property
    def device(self) -> str:
        """The GPU, if anything was measured on one, or the CPU."""
        return str(self.machine["gpu" if any(it.place == "cuda" for it in self.results) else "cpu"])

    def other_machine(self, other: "Run", keys: Iterable[str]) -> str:
        """What differs of these, in words; empty if nothing does."""
        differing = [key for key in keys if self.machine.get(key) != other.machine.get(key)]
        return "; ".join(f"{key} {self.machine.get(key)}, here {other.machine.get(key)}" for key in differing)


def start() -> Run:
    return Run(date.today().isoformat(), machine.describe())


def microseconds(seconds: list[float]) -> list[float]:
    return [float(f"{value * 1e6:.4g}") for value in seconds]


# Names in the file, which people read, and here.
HEAD = {"copy GB/s": ("copy_speeds", 1e9), "gemm TFLOP/s": ("gemm_speeds", 1e12)}
PAIR = {"bytes moved": "moved", "ours us": "ours_us", "torch us": "torch_us"}


def write(path: Path, run: Run) -> None:
    """At once, so that whoever stops a run keeps what it has measured. A line a pair."""
    head: dict[str, Any] = {"date": run.date, "machine": run.machine}
    for name, (attribute, unit) in HEAD.items():
        head[name] = {place: round(speed / unit, 2) for place, speed in getattr(run, attribute).items()}
    head["skipped"] = run.skipped
    of_file = {attribute: name for name, attribute in PAIR.items()}
    pairs = [{of_file.get(key, key): value for key, value in asdict(it).items() if value} for it in run.results]
    lines = ",\n".join(json.dumps(pair, separators=(",", ":")) for pair in pairs)
    path = path.resolve()  # a link stays one
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(f'{json.dumps(head, indent=1)[:-2]},\n "pairs": [\n{lines}\n]}}\n')
    os.replace(unfinished, path)


def read(path: Path) -> Run:
    """Raises ValueError where the file is not one that ``write`` wrote, OSError where there is none."""
    try:
        raw = json.loads(path.read_text())
        speeds = {
            attribute: {place: speed * unit for place, speed in raw.get(name, {}).items()}
            for name, (attribute, unit) in HEAD.items()
        }
        results = [_result(pair) for pair in raw["pairs"]]
        return Run(raw["date"], dict(raw["machine"]), **speeds, skipped=raw.get("skipped", {}), results=results)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} holds no results of this benchmark ({type(error).__name__}: {error})") from error


def _result(pair: dict[str, Any]) -> Result:
    defaults = {"variant": "", "moved": 0, "waited": 0.0}
    result = Result(**{**defaults, **{PAIR.get(key, key): value for key, value in pair.items()}})
    if not (len(result.ours_us) == len(result.torch_us) >= FEWEST_SAMPLES):
        raise ValueError(f"{result.name}: needs as many samples of torch's as of ours, and {FEWEST_SAMPLES} at least")
    return result
