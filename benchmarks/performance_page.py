"""The tables of docs/performance.md: some cases on CPUs and GPUs, linear layers called one by one, counted loops."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.raw_samples import Session
from mpkernels.bench.results import Result

COPIES = {"H200": 4.1e12, "H100": 3.0e12}  # bytes a second, measured on the H200
ISSUED = 132 * 4 * 32 * 1.755e9  # threads' instructions a second: multiprocessors, their schedulers, a warp, the clock
REACHED = 0.8  # of ISSUED, at best

Table = tuple[list[str], list[list[str]]]  # header and rows

CPUS = (
    "step cpu-2 fp32 100x500k vs torch.amp fused",
    "step cpu-2 bf16 100x500k vs torch.amp fused",
    "step moments-bf16 cpu-2 bf16 100x500k vs torch.amp fused",
    "step moments-8bit cpu-2 bf16 100x500k vs torch.amp fused",
    "step no-clipping cpu-2 bf16 100x500k vs torch.amp fused",
    "step cpu-2 fp32 1000x10-host-cost vs torch.amp fused",
    "train split-master cpu-2 bf16 mlp-20x1000-batch-512 vs torch.amp fused",
    "train split-master cpu-2 bf16 transformer-tiny vs torch.amp fused",
    "train cpu-2 bf16 transformer-tiny vs torch.amp fused",
    "linear_act cpu-2 bf16 512x768x3072 vs torch.amp eager",
    "update_scale_ cpu-2 fp32 a-scale vs torch",
)
CLOCKS = {"device": "GPU", "loop": "loop", "host": "host"}
GPUS = {  # clock of mpkernels/bench/pairs.py -> the cases that it times
    "device": (
        "step cuda bf16 1x1e9 vs torch.amp fused",
        "step cuda fp32 1x1e9 vs torch.amp fused",
        "step moments-bf16 cuda bf16 1x1e9 vs torch.amp fused",
        "step moments-8bit cuda bf16 1x1e9 vs torch.amp fused",
        "step cuda bf16 gpt2 vs torch.amp fused",
        "step cuda bf16 1000x5k vs torch.amp fused",
        "linear_act cuda bf16 64x4096x16384 vs torch.amp eager",
        "linear_act cuda bf16 512x1024x4096 vs torch.amp eager",
        "linear_act cuda bf16 8192x1024x4096 vs torch.amp eager",
        "swiglu_mlp cuda bf16 512x4096x14336 vs torch.amp eager",
        "swiglu_mlp cuda bf16 8192x4096x14336 vs torch.amp eager",
    ),
    "host": ("step cuda bf16 1000x10-host-cost vs torch.amp fused",),
    "loop": (
        "step cuda bf16 100x500k vs torch fused",
        "step cuda bf16 1000x5k vs torch fused",
        "train split-master cuda bf16 gpt2-small-16x1024 vs torch.amp fused",
        "train cuda bf16 gpt2-small-16x1024 vs torch.amp fused",
        "train split-master cuda bf16 transformer-tiny vs torch.amp fused",
        "train cuda bf16 transformer-tiny vs torch.amp fused",
        "step masters-muon cuda bf16 16x1024x1024 vs torch Muon",
        "step masters-muon cuda fp16 16x1024x1024 vs torch Muon",
    ),
}
SMALL = 8192  # most hidden features of a small MLP, or output features of a small layer
WAYS = {"native": "ours, in C++", "triton": "ours, in Triton, the best tile"}


def of_cpus(runs: dict[str, Session]) -> Table:
    """Return times torch's speed in each run that has measured all of CPUS."""
    medians = {name: {it.name: f"{it.ratio.median:.2f}" for it in run.results} for name, run in runs.items()}
    complete = {name: ratios for name, ratios in medians.items() if ratios.keys() >= set(CPUS)}
    return ["case", *complete], [[case, *(ratios[case] for ratios in complete.values())] for case in CPUS]


def of_gpu(device: str, runs: dict[str, Session], columns: dict[str, Callable[[Result, Session], str]]) -> Table:
    """Return the results of GPUS on a device, each case from its newest run. ``runs`` has the newest last."""
    newest = {result.name: (result, run) for run in runs.values() for result in run.results}
    links = ", ".join(f"[samples](../benchmarks/results/{name}.json)" for name in runs)
    rows = [
        [case, CLOCKS[clock], *(column(*newest[case]) for column in columns.values())]
        for clock, cases in GPUS.items()
        for case in cases
        if case in newest
    ]
    return [f"{device} ({links})", "timed", *columns], rows


def calls(path: Path) -> Table:
    """Return the times of benchmarks/selector_table.py as multiples of torch's speed: the least and the most of all
    calls with the same number of rows."""
    found = json.loads(path.read_text())
    ratios: dict[tuple[str, str, str], dict[int, list[float]]] = {}
    for run in found["runs"]:
        for name, microseconds in run["us"].items():
            op, _, sizes, _ = name.split()
            rows, _, hidden = map(int, sizes.split("x"))
            for kernel, best in _best(microseconds):
                row = op, f"to {SMALL}" if hidden <= SMALL else "above", WAYS[kernel]
                ratios.setdefault(row, {}).setdefault(rows, []).append(microseconds["torch"] / best)
    all_rows = sorted({rows for by_rows in ratios.values() for rows in by_rows})
    machine = "{gpu}, torch {torch}".format(**found["machine"])
    header = [f"{machine} ([samples](../benchmarks/results/rule/{path.name}))", "hidden", "computed by"]
    cells = [[*row, *(_range(ratios[row].get(it, [])) for it in all_rows)] for row in sorted(ratios, key=_order)]
    return [*header, *(f"{rows} rows" for rows in all_rows)], cells


def _best(microseconds: dict[str, float]) -> Iterator[tuple[str, float]]:
    """Yield each kernel's time, in its best tile."""
    for kernel in WAYS:
        if tiles := [time for name, time in microseconds.items() if name.split()[0] == kernel]:
            yield kernel, min(tiles)


def _order(row: tuple[str, str, str]) -> tuple[int, str, bool]:
    op, hidden, way = row
    return [*WAYS.values()].index(way), op, hidden == "above"


def _range(ratios: list[float]) -> str:
    if not ratios:
        return ""
    least, most = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return least if least == most else f"{least} to {most}"


def of_loops(path: Path) -> Table:
    """Return what an element costs in each loop that the compile gate has counted, and which cost decides."""
    counted = json.loads(path.read_text())["loops"]["kernels"]
    header = ["", "instructions an element", "bytes an element", *(f"{chip}: bound by" for chip in COPIES)]
    rows = []
    for title, (loop,) in ((title, chips.values()) for title, chips in counted.items()):
        shares = [share_of_time(loop, chip) for chip in COPIES]
        bounds = [f"{'instructions' if share > REACHED else 'bytes'} ({share:.0%})" for share in shares]
        rows.append([title, f"{loop['instructions'] / loop['elements']:.1f}", f"{loop['moved']:g}", *bounds])
    return header, rows


def share_of_time(loop: dict[str, float], chip: str) -> float:
    """Return how long a loop's instructions take at the chip's full rate, as a share of its bytes' time in a copy."""
    return loop["instructions"] / ISSUED / (loop["moved"] * loop["elements"] / COPIES[chip])
