"""Reads and writes files of raw samples, as ``python -m benchmarks --json`` keeps them."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks import other_libraries
from mpkernels._shared.files import replacing
from mpkernels.bench import results
from mpkernels.bench.pairs import FEWEST_SAMPLES
from mpkernels.bench.results import Result
from mpkernels.doctor.machine import Description, describe


@dataclass
class Session(results.Session):
    """What was measured on one machine on one day, and the speeds of the machine itself."""

    date: str = field(default_factory=lambda: date.today().isoformat())
    machine: Description = field(default_factory=lambda: describe() | other_libraries.versions())
    copy_speeds: dict[str, float] = field(default_factory=dict)  # bytes a second, by place
    gemm_speeds: dict[str, float] = field(default_factory=dict)  # flops a second, by place and dtype

    @property
    def device(self) -> str:
        return str(self.machine["gpu" if self.is_on_gpu else "cpu"])

    def other_machine(self, other: "Session", keys: Iterable[str]) -> str:
        """Say which of these facts about the two machines differ; "" if none does."""
        differing = [key for key in keys if self.machine.get(key) != other.machine.get(key)]
        return "; ".join(f"{key} {self.machine.get(key)}, here {other.machine.get(key)}" for key in differing)


# name in the file -> attribute of Session (and its unit), or of Result
HEAD = {"copy GB/s": ("copy_speeds", 1e9), "gemm TFLOP/s": ("gemm_speeds", 1e12)}
PAIR = {"bytes moved": "moved", "ours us": "ours_us", "torch us": "torch_us"}


def write(path: Path, session: Session) -> None:
    """Replace the file at once, so that a run that is stopped keeps its results. Each pair has a line."""
    head: dict[str, Any] = {"date": session.date, "machine": session.machine}
    for name, (attribute, unit) in HEAD.items():
        head[name] = {place: round(speed / unit, 2) for place, speed in getattr(session, attribute).items()}
    head["skipped"] = session.skipped
    names = {attribute: name for name, attribute in PAIR.items()}
    pairs = [{names.get(key, key): value for key, value in asdict(it).items() if value} for it in session.results]
    lines = ",\n".join(json.dumps(pair, separators=(",", ":")) for pair in pairs)
    with replacing(path.resolve()) as file:  # a link stays a link
        file.write(f'{json.dumps(head, indent=1)[:-2]},\n "pairs": [\n{lines}\n]}}\n'.encode())


def read(path: Path) -> Session:
    """Read what ``write`` wrote. Raise ValueError if the file is another, OSError if there is none."""
    try:
        raw = json.loads(path.read_text())
        speeds = {
            attribute: {place: speed * unit for place, speed in raw.get(name, {}).items()}
            for name, (attribute, unit) in HEAD.items()
        }
        found = [_result(pair) for pair in raw["pairs"]]
        return Session(raw["date"], dict(raw["machine"]), skipped=raw.get("skipped", {}), results=found, **speeds)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} holds no results of this benchmark ({type(error).__name__}: {error})") from error


def _result(pair: dict[str, Any]) -> Result:
    defaults = {"variant": "", "moved": 0, "waited": 0.0}
    result = Result(**{**defaults, **{PAIR.get(key, key): value for key, value in pair.items()}})
    if not (len(result.ours_us) == len(result.torch_us) >= FEWEST_SAMPLES):
        raise ValueError(f"{result.name}: needs as many samples of torch's as of ours, and {FEWEST_SAMPLES} at least")
    return result
