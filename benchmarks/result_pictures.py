"""Makes the first part of RESULTS.md: a picture for each family of results, and the same numbers as CSV.

The columns are those of Liger-Kernel's benchmark data, with our version in place of theirs.
"""

import csv
import io
import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

from benchmarks import adamw_beside_others, chart, models
from benchmarks.chart import Axis, Dot
from benchmarks.raw_samples import Session
from mpkernels.bench.results import Result

HEADER = [
    *("kernel_name", "kernel_provider", "kernel_operation_mode", "metric_name", "metric_unit"),
    *("x_name", "x_label", "x_value", "y_value_50", "y_value_20", "y_value_80"),
    *("extra_benchmark_config_str", "gpu_name", "timestamp", "mpkernels_version"),
]
TENSORS = "tensors", "number x size of tensors"
ELEMENTS = {sizes.name: sizes.elements for sizes in adamw_beside_others.SIZES}
SHAPES = dict(zip(adamw_beside_others.CLIPS, ("", "hollow"), strict=True))
Row = list[Any]


class Family(NamedTuple):
    name: str  # of the family's files
    title: str
    text: str
    picture: str
    rows: list[Row]

    def files(self, folder: Path) -> dict[Path, str]:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([HEADER, *self.rows])
        return {folder / f"{self.name}.svg": self.picture, folder / f"{self.name}.csv": text.getvalue()}

    def lines(self) -> Iterator[str]:
        yield from (f"## {self.title}", "", self.text, f"The same as [CSV](pictures/{self.name}.csv).", "")
        yield from (f"![{self.title}](pictures/{self.name}.svg)", "")


def compared(run: Session) -> list[Result]:
    """Return the results of a run that come from cases of adamw_beside_others.py."""
    return [it for it in run.results if it.op in adamw_beside_others.CLIPS]


def undisturbed(found: list[Result]) -> list[Result]:
    """Return the results that were measured while no other programs were at work."""
    return [it for it in found if "busy" not in it.doubts]


def of_run(name: str, run: Session) -> Iterator[Family]:
    """Yield a run's families of times and of bytes."""
    found = compared(run)
    where, source = f"{run.device}, {run.date}", [run.device, run.date, run.machine["mpkernels"]]
    text = (
        "By number and size of tensors. A dot is the other's time over ours, the median of pairs in turns, and its "
        "95 % interval: right of 1 ours is faster. There is no scaler. torch fused has fp32 weights."
    )
    if quiet := undisturbed(found):
        rows = [*chain.from_iterable(_speeds(it, source) for it in quiet)]
        yield Family(f"step-{name}", f"AdamW's step beside others: {where}", text, _picture_of_steps(quiet), rows)
    text = (
        "Weight, grad and AdamW's states after a step, and the most that is allocated during one that clips, counted."
    )
    kept = bytes_a_parameter(found)
    rows = [*chain.from_iterable(_bytes(label, values, source) for label, values in kept.items())]
    yield Family(f"bytes-{name}", f"Bytes a parameter: {where}", text, _picture_of_bytes(kept), rows)


def side(result: Result, is_ours: bool) -> str:
    """Return the name of a side: the rival's, or ours with the dtypes of weights and moments."""
    if not is_ours:
        return result.baseline
    moments = result.variant.removeprefix("moments-").replace("8bit", "8-bit") or "fp32"
    return f"mpkernels, {result.dtype} weights, {moments} moments"


def _picture_of_steps(found: list[Result]) -> str:
    rows: dict[tuple[str, str, str], list[Dot]] = {}
    for result in found:
        kind = f"{'second' if result.place == 'cpu-1' else 'first'} {SHAPES[result.op]}".strip()
        dots = rows.setdefault((result.case, result.baseline, side(result, True)), [])
        dots.append(Dot(result.ratio.median, kind, result.name, (result.ratio.low, result.ratio.high)))
    drawn: list[chart.Row] = []
    for sizes in dict.fromkeys(case for case, *_ in rows):
        drawn.append((sizes, []))
        drawn += [(f"{theirs} / {ours}", dots) for (case, theirs, ours), dots in rows.items() if case == sizes]
    colors = {"first": "all threads, or the GPU", "second": "one thread"}
    legend = {
        f"{color} {shape}".strip(): f"{op.replace('-', ' ')}, {threads}"
        for op, shape in SHAPES.items()
        for color, threads in colors.items()
    }
    return chart.chart(drawn, chart.TIMES, "their time / ours; right of 1 ours is faster", legend)


def bytes_a_parameter(found: list[Result]) -> dict[str, tuple[float, float]]:
    """Return the bytes a parameter that each side keeps, and its peak while it clips and steps, on the first list of
    tensors."""
    kept: dict[str, tuple[float, float]] = {}
    for result in found:
        for name, counts in result.counts.items():
            if result.op == "clip-and-step":
                elements = ELEMENTS[result.case]
                sizes = counts["kept"] / elements, counts["peak memory"] / elements
                kept.setdefault(side(result, name == "ours"), sizes)
    return dict(sorted(kept.items(), key=lambda it: (it[1], it[0])))


def _picture_of_bytes(kept: dict[str, tuple[float, float]]) -> str:
    legend = {"first": "kept: weight, grad and states", "second hollow": "at the peak of a step"}
    rows = [
        (label, [Dot(value, it, f"{label}, {legend[it]}") for value, it in zip(values, legend, strict=True)])
        for label, values in kept.items()
    ]
    return chart.chart(rows, Axis((0, 4, 8, 12, 16, 20)), "bytes a parameter", legend)


def _speeds(result: Result, source: Row) -> Iterator[Row]:
    for is_ours, samples in ((True, result.ours_us), (False, result.torch_us)):
        names = "adamw", side(result, is_ours), result.op, "speed", "ms", *TENSORS, result.case
        more = {"place": result.place, "beside": side(result, not is_ours)}
        yield _row(names, [microseconds / 1e3 for microseconds in samples], more, source)


def _bytes(label: str, values: tuple[float, float], source: Row) -> Iterator[Row]:
    for metric, value in zip(("kept memory", "peak memory"), values, strict=True):
        yield _row(("adamw", label, "clip-and-step", metric, "bytes a parameter", *TENSORS, "any"), [value], {}, source)


def _row(names: tuple[str, ...], samples: list[float], more: dict[str, Any], source: Row) -> Row:
    fifths = quantiles(samples * (1 + (len(samples) == 1)), n=5, method="inclusive")
    return [*names, *(f"{it:.5g}" for it in (median(samples), fifths[0], fifths[3])), json.dumps(more), *source]


def of_models(path: Path) -> Family:
    """Return the family of times and memory of whole models, from a file of benchmarks/models.py."""
    found = json.loads(path.read_text())
    chip, day = models.chip(found["machine"]), path.stem[-len("2026-11-25") :]
    text = (
        "A forward and backward of models of transformers with 4 layers, after `mpkernels.nn.fuse(model)`, beside the "
        "same model as it was." + models.how_chosen(path)
    )
    version = found["machine"]["mpkernels"]
    rows = [*chain.from_iterable(_of_model(it, [chip, day, version]) for it in found["rows"])]
    picture = _picture_of_models(found["rows"])
    return Family(f"models-{path.stem}", f"Whole models, fused: {chip}, {day}", text, picture, rows)


def _picture_of_models(found: list[models.Row]) -> str:
    legend = {"first": "peak memory beside the weights", "second hollow": "time: median, and least to most of 7 rounds"}
    drawn: list[chart.Row] = []
    for row in found:
        times, name = models.ratios(row, "ours", "theirs"), f"{row['model']}, {row['dtype']}"
        peak = Dot(models.peak(row), "first", f"{name}, peak memory")
        drawn.append((name, [peak, Dot(median(times), "second hollow", f"{name}, time", (times[0], times[-1]))]))
    note = "share of the model as it was; left of 1 the fused one needs less"
    return chart.chart(drawn, Axis((0, 0.25, 0.5, 0.75, 1, 1.25)), note, legend)


def _of_model(row: models.Row, source: Row) -> Iterator[Row]:
    for way, seconds in row["seconds"].items():
        provider = "mpkernels" if way.startswith("ours") else "torch"
        more = {"dtype": row["dtype"], "compiled": way.endswith("compiled")}
        sizes = {metric: row[key][way] / 1e6 for metric, key in MEMORY.items() if way in row[key]}
        values = {("speed", "ms"): [it * 1e3 for it in seconds], **{(it, "MB"): [size] for it, size in sizes.items()}}
        for metric, samples in values.items():
            yield _row(("fuse", provider, "full", *metric, "model", "model", row["model"]), samples, more, source)


MEMORY = {"peak memory": "peak", "saved memory": "saved"}
