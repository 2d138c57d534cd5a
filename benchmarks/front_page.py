"""README's first screen, from raw samples: a number for memory, one for the step, one for a training; two pictures."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks import chart, readme_numbers, result_pictures
from benchmarks.chart import Axis, Dot
from benchmarks.raw_samples import Session
from benchmarks.readme_numbers import BESIDE, ONE, OURS, RIVALS, Front
from mpkernels.bench.results import Result

TORCH = "torch fused"
TRAINING = "train split-master vs torch.amp fused"
FOLDER = "benchmarks/pictures"
BYTES, TIMES = "front-bytes", "front-times"


class Found(NamedTuple):
    kept: dict[str, float]  # side -> bytes a parameter
    steps: dict[tuple[str, str], Result]  # clip and step of ONE: our side and theirs -> result
    training: Result  # of the largest model
    device: str
    of_steps: str  # the names of the runs
    of_training: str


def find(compared: dict[str, Session], fronts: Iterable[Front], runs: dict[str, Session]) -> Found | None:
    """Return what the first screen shows; None where no GPU was measured."""
    on_gpu = [(name, run) for name, run in compared.items() if run.is_on_gpu]
    trained = [it.groups[TRAINING] for it in fronts if it.place == "cuda" and TRAINING in it.groups]
    if not on_gpu or not trained:
        return None
    name, run = on_gpu[-1]
    quiet = result_pictures.undisturbed(result_pictures.compared(run))
    at_one = [it for it in quiet if it.op == "clip-and-step" and it.case == ONE]
    steps = {(result_pictures.side(it, True), it.baseline): it for it in at_one}
    training = max(trained[-1], key=lambda it: it.counts["theirs"]["peak memory"])
    of_training = next(name for name, run in runs.items() if any(it is training for it in run.results))
    return Found(readme_numbers.kept_bytes(compared.values()), steps, training, run.device, name, of_training)


def lines(found: Found | None) -> Iterator[str]:
    if found is None:
        return
    ours, theirs = found.kept[OURS[1]], found.kept[TORCH]
    yield f"* **{ours:.2f} bytes a parameter** for weight, grad and AdamW's state, where torch takes {theirs:g}."
    yield "  bf16 weights, 2 bytes more for exact fp32 masters, 8-bit moments; torch's weights and moments are fp32."
    times = {sides[1]: found.steps[sides].ratio.median for sides in BESIDE if sides in found.steps}
    others = ", ".join(f"{times[it]:.1f} times {RIVALS[it].partition(',')[0]}" for it in times if it != TORCH)
    faster = f"{times[TORCH]:.2f} times as fast"
    yield f"* **{faster}**: clip and step of these, beside torch's fused AdamW over fp32 weights."
    where = f"One tensor of 50 million, {found.device} ({_source(found.of_steps)})"
    yield f"  {where}. In the others' dtypes, ours reaches {others} speed."
    training = found.training
    peak = training.counts["ours"]["peak memory"] / training.counts["theirs"]["peak memory"]
    model, _, batch = training.case.rpartition("-")
    step = f"a whole training step of {model}, at {peak:.2f} of the peak memory"
    yield f"* **{training.ratio.median:.2f} times as fast**: {step}."
    where = f"{batch.replace('x', ' x ')} tokens, {found.device} ({_source(found.of_training)})"
    yield f"  bf16 weights, fp32 moments, beside torch.amp with fp32 weights; {where}."
    yield ""
    pictures = ((BYTES, "Bytes a parameter"), (TIMES, "Time of a step that clips, theirs over ours"))
    yield " ".join(f'<img src="{FOLDER}/{name}.svg" alt="{text}" width="49%">' for name, text in pictures)


def _source(run: str) -> str:
    return readme_numbers.samples([run], "benchmarks/results")


def pictures(found: Found | None, root: Path) -> dict[Path, str]:
    if found is None:
        return {}
    shown = dict.fromkeys([it for pair in BESIDE for it in pair])
    rows = sorted(((side, found.kept[side]) for side in shown if side in found.kept), key=lambda it: it[1])
    kept = [(_named(side), [Dot(value, _color(side), side)]) for side, value in rows]
    times = []
    for sides in BESIDE:
        if sides in found.steps:
            ratio = found.steps[sides].ratio
            label = f"{_named(sides[1])} / {sides[0]}"
            times.append((label, [Dot(ratio.median, "first", label, (ratio.low, ratio.high))]))
    note = "weight, grad and states of AdamW, bytes a parameter"
    of_times = f"their time / ours: clip and step of {ONE} on one {found.device}"
    folder = root / FOLDER
    return {
        folder / f"{BYTES}.svg": chart.chart(kept, Axis((0, 4, 8, 12, 16)), note, {}),
        folder / f"{TIMES}.svg": chart.chart(times, Axis((0, 1, 2, 3, 4, 5), "x"), of_times, {}),
    }


def _named(side: str) -> str:
    return RIVALS.get(side, side)


def _color(side: str) -> str:
    return "first" if side not in RIVALS else "second"
