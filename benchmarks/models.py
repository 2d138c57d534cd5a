"""Whole models, fused by ``mpkernels.nn.fuse`` beside unfused: time and memory of a forward and backward, on a CPU with
and without torch.compile, which takes minutes for a GPU.

``python -m benchmarks.models NAME`` measures the models of architectures.py on the GPU if there is one, and writes
results/models/NAME.json for the book. ``python -m benchmarks.models NAME native`` pins what computes layers and MLPs.
"""

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from benchmarks import counting, formatting
from mpkernels import selector
from mpkernels.bench.pairs import Workload
from mpkernels.doctor.machine import describe
from mpkernels.nn import fuse

FOLDER = Path(__file__).parent / "results" / "models"
ROUNDS, WARM_UP = 7, 3  # torch compiles while it warms up
STEPS = {"cpu": 1, "cuda": 10}  # of a round: the host prepares one while a GPU works on those before
DTYPES = {  # by device: the name of each, whether autocast is on, and the weights' dtype
    "cpu": {"bf16 autocast": (True, torch.float32), "fp32": (False, torch.float32)},
    "cuda": {"bf16 autocast": (True, torch.float32), "bf16": (False, torch.bfloat16)},
}

Maker = Callable[[], tuple[Module, dict[str, Tensor]]]  # returns a model and its inputs
Row = dict[str, Any]


def measure(make: Maker, is_mixed: bool, dtype: torch.dtype, device: str) -> Row:
    """Return the kernels that compute the fused model, and for each side: the seconds of each round, the peak memory
    of a step without the weights, and the bytes that its forward saves for the backward."""
    torch.manual_seed(0)
    plain, batch = make()
    plain = plain.train().to(device, dtype)
    batch = {name: it.to(device, dtype if it.is_floating_point() else None) for name, it in batch.items()}
    fused = deepcopy(plain)
    report = fuse(fused)
    models = {"ours": fused, "theirs": plain}
    if device == "cpu":
        models |= {f"{side} compiled": torch.compile(model) for side, model in models.items()}
    steps = {side: partial(step, model, batch, is_mixed, device) for side, model in models.items()}
    for run in [*steps.values()] * WARM_UP:
        run()
    found = {
        "sites": sorted({site.computed_by for site in report.fused}),
        "seconds": seconds_in_turns(steps, device),
        "peak": {side: counting.peak_beside(run, device) for side, run in steps.items()},
        "saved": {side: counting.saved_bytes(run) for side, run in steps.items()},
    }
    torch.compiler.reset()  # or torch would silently compile no more after eight models of one kind
    return found


def step(model: Module, batch: Mapping[str, Tensor], is_mixed: bool, device: str) -> None:
    with torch.autocast(device, torch.bfloat16, enabled=is_mixed):
        loss = model(**batch).loss
    loss.backward()
    model.zero_grad()


def seconds_in_turns(runs: Mapping[str, Workload], device: str) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {side: [] for side in runs}
    settle = torch.cuda.synchronize if device == "cuda" else int
    for _ in range(ROUNDS):
        for side, run in runs.items():
            settle()
            start = perf_counter()
            for _ in range(STEPS[device]):
                run()
            settle()
            seconds[side].append((perf_counter() - start) / STEPS[device])
    return seconds


def times(theirs: str, ours: str) -> Callable[[Row], str]:
    """Return the column "how many times as fast as theirs is ours": the median of the rounds, and least to most."""

    def cell(row: Row) -> str:
        if not row["seconds"].keys() >= {theirs, ours}:
            return ""
        found = ratios(row, theirs, ours)
        return f"{median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})"

    return cell


def ratios(row: Row, one: str, other: str) -> list[float]:
    """Return ``one`` side's time over the ``other``'s in each round, the least first."""
    seconds = row["seconds"]
    return sorted(first / second for first, second in zip(seconds[one], seconds[other], strict=True))


def peak(row: Row) -> float:
    """Return the fused model's peak memory as a share of the plain one's."""
    return float(row["peak"]["ours"] / row["peak"]["theirs"])


def sizes(key: str, theirs: str, ours: str) -> Callable[[Row], str]:
    """Return the column of both sides' bytes, and our bytes over theirs."""

    def cell(row: Row) -> str:
        sides = row.get(key, {})
        if theirs not in sides:
            return ""
        return f"{formatting.size(sides[ours])} / {formatting.size(sides[theirs])} ({sides[ours] / sides[theirs]:.2f})"

    return cell


AS_THEY_ARE = "theirs", "ours"
COMPILED = "theirs compiled", "ours compiled"
COLUMNS: dict[str, Callable[[Row], str]] = {
    "model": lambda row: row["model"],
    "in": lambda row: row["dtype"],
    "computed by": lambda row: ", ".join(row["sites"]),
    "x torch": times(*AS_THEY_ARE),
    "torch.compile: x torch": times("theirs", "theirs compiled"),
    "both compiled: x torch": times(*COMPILED),
    "peak": sizes("peak", *AS_THEY_ARE),
    "peak, compiled": sizes("peak", *COMPILED),
    "saved": sizes("saved", *AS_THEY_ARE),
    "saved, compiled": sizes("saved", *COMPILED),
}


def table(path: Path) -> tuple[Iterable[str], Iterable[Iterable[str]]]:
    """Return header and rows. An older file lacks some columns."""
    rows = json.loads(path.read_text())["rows"]
    cells = {header: [column(row) for row in rows] for header, column in COLUMNS.items()}
    used = {header: column for header, column in cells.items() if any(column)}
    return used, zip(*used.values(), strict=True)


def chip(machine: Mapping[str, Any]) -> str:
    """Return the name of what the models ran on, from a file's facts about its machine."""
    return str(machine.get("gpu") or machine["cpu"])


def pinned_in(path: Path) -> str:
    """Return what computed layers and MLPs in a file; "" if the selector's table chose."""
    return str(json.loads(path.read_text()).get("pinned", ""))


def how_chosen(path: Path) -> str:
    """Return a sentence for a file in which not the table chose."""
    pinned = pinned_in(path)
    return f' Here `mpkernels.selector.pin("{pinned}")` chose what computes them.' if pinned else ""


def main(name: str, models: Mapping[str, Maker], device: str, pinned: str | None = None) -> None:
    selector.pin(pinned)
    rows = [
        {"dtype": dtype, "model": model, **measure(make, *numbers, device)}
        for model, make in models.items()
        for dtype, numbers in DTYPES[device].items()
    ]
    FOLDER.mkdir(exist_ok=True)
    facts = {"machine": describe(), "transformers": metadata.version("transformers")}
    facts |= {"pinned": pinned} if pinned else {}
    found = {**facts, "rows": rows}
    (FOLDER / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    from benchmarks.architectures import MODELS

    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python -m benchmarks.models NAME [KERNEL], which writes benchmarks/results/models/NAME.json")
    main(sys.argv[1], MODELS, "cuda" if torch.cuda.is_available() else "cpu", *sys.argv[2:])
