"""RESULTS.md's tables of all machines and of other libraries, each row from its newest run; what fusing saves."""

import json
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks import adamw_beside_others, models, result_pictures
from benchmarks.formatting import table
from benchmarks.raw_samples import Session
from mpkernels.bench.results import Result

STEP = "the optimizer's step, with unscaling and clipping, over 16 bits or fp32; torch's fused AdamW over fp32"
ROWS = {
    STEP: "step vs torch.amp fused",
    "the same with 8-bit moments, over bf16": "step moments-8bit vs torch.amp fused",
    "clip and step without a scaler: `AdamW(max_norm=...)` over bf16 or fp32; torch's over fp32": "step vs torch fused",
    "the same calls, only the imports changed, both over fp32": "step imports vs torch fused",
    "the same where each step clips": "step imports-clipping vs torch fused",
    "clip and step without a scaler, both over fp32: `Adam(max_norm=...)`": "step adam vs torch fused",
    "likewise `SGD(momentum=0.9, max_norm=...)`": "step sgd-momentum vs torch fused",
    "likewise `Lion(max_norm=...)`, beside torch-optimi's": "step lion vs torch-optimi",
    "`Muon(max_norm=...)` over bf16 or fp32, beside torch.optim.Muon over fp32": "step muon vs torch Muon",
    "a training step over bf16; torch.amp's over fp32 with fused AdamW": "train split-master vs torch.amp fused",
    "the same with fp32 weights under autocast, as torch.amp has them": "train vs torch.amp fused",
    "a linear layer and its activation under autocast": "linear_act vs torch.amp eager",
    "the norm of all grads, and whether they are finite": "grad_stats vs torch",
}


class Front(NamedTuple):
    """A machine as README shows it."""

    names: list[str]  # of the machine's raw files
    run: Session  # the newest
    place: str  # the GPU, or the most threads of any run
    groups: dict[str, list[Result]]  # the comparison's title -> its results on ``place``
    on_one_thread: dict[str, list[Result]]  # the same on one thread; empty if ``place`` is one thread


def rows(runs: list[Front]) -> tuple[list[str], list[list[str]]]:
    """Return the header and the cells of RESULTS.md's table of all machines."""
    header = ["times torch's speed: median (least to most) of all cases", *map(_machine, runs)]
    return header, [[name, *(_ratios(it, title) for it in runs)] for name, title in ROWS.items()]


def place_of(*runs: Session) -> str:
    """Return the runs' GPU, or the most threads of any."""
    places = {result.place for run in runs for result in run.results}
    return max(places, key=lambda it: (it == "cuda", len(it), it))


def _machine(front: Front) -> str:
    name = (
        f"{front.run.device.replace('(R)', '')}{_cores(front.run, front.place)}, torch {front.run.machine.get('torch')}"
    )
    return f"{name} ({samples(front.names, 'results')})"


def _cores(run: Session, place: str) -> str:
    threads, cores = place.removeprefix("cpu-"), run.machine.get("cores")
    total = f" of {cores}" if cores and str(cores) != threads else ""
    return "" if place == "cuda" else f", {threads}{total} cores"


def samples(names: Iterable[str], folder: str) -> str:
    return ", ".join(f"[samples]({folder}/{name}.json)" for name in names)


def _ratios(front: Front, title: str) -> str:
    one = front.on_one_thread.get(title)
    return _ratio(front.groups.get(title, [])) + (f"; one thread {_ratio(one)}" if one else "")


def _ratio(found: list[Result]) -> str:
    if not found:
        return "not measured"
    ratios = sorted(it.ratio.median for it in found)
    spread = f" ({ratios[0]:.2f} to {ratios[-1]:.2f})" if len(ratios) > 1 else ""
    return f"**{median(ratios):.2f}**{spread}"


ONE = adamw_beside_others.SIZES[0].name  # one large tensor: bytes decide, and not the host
SHORT = {  # names for CPUs of which virtual machines tell family and model alone
    "AMD EPYC, family 23 model 1": "AMD Zen 1",
    "AMD EPYC, family 25 model 1": "AMD Zen 3",
    "AMD EPYC, family 25 model 17": "AMD Zen 4",
    "AMD EPYC, family 26 model 2": "AMD Zen 5",
    "Intel(R) Xeon(R) Processor, family 6 model 207": "Intel Emerald Rapids",
}
OURS = "mpkernels, bf16 weights, fp32 moments", "mpkernels, bf16 weights, 8-bit moments"
BESIDE = (  # our side, and the rival that it is compared with
    (OURS[0], "torch fused"),
    (OURS[1], "torch fused"),
    ("mpkernels, fp32 weights, bf16 moments", "torch fused, bf16 moments"),
    ("mpkernels, fp32 weights, 8-bit moments", "torchao-8bit"),
    ("mpkernels, fp32 weights, 8-bit moments", "bitsandbytes-8bit"),
    ("mpkernels, bf16 weights, bf16 moments", "torch-optimi-kahan"),
    (OURS[1], "flashoptim-24bit"),
)
RIVALS = {
    "torch fused": "torch's fused, fp32 weights",
    "torch fused, bf16 moments": "torch's fused with moments put into it",
    "torchao-8bit": "torchao's",
    "bitsandbytes-8bit": "bitsandbytes'",
    "torch-optimi-kahan": "torch-optimi's, Kahan sums",
    "flashoptim-24bit": "FlashOptim's, 24-bit masters",
}
WITHOUT_SCALER = "step vs torch fused"
IMPORTS, IMPORTS_CLIPPING = "step imports vs torch fused", "step imports-clipping vs torch fused"
FROM_DOCS = "../benchmarks/results"
WORTH_A_WORD = 0.95  # peak memory is mentioned if the fused model needs at most this share


def beside(compared: dict[str, Session]) -> Iterator[str]:
    """Yield RESULTS.md's table of AdamW beside other libraries."""
    if compared:
        yield from table(*_beside_others(compared, kept_bytes(compared.values())))
        over = "sizes and numbers of tensors, or the only case measured"
        yield f"Median (least to most) over {over}; below 1, theirs is faster. {_sources(compared)}."
        yield ""


def elsewhere(compared: dict[str, Session], machines: list[Front], fused: Iterable[Path]) -> Iterator[str]:
    """Yield what docs/performance.md says of CPUs, of changed imports, and of whole models' memory."""
    shown = {run.device for run in compared.values() if result_pictures.undisturbed(result_pictures.compared(run))}
    others = [it for it in machines if it.run.device not in shown and WITHOUT_SCALER in it.groups]
    words = [
        f"{short(it.run, it.place)}: {_ratios(it, WITHOUT_SCALER)} ({samples(it.names, FROM_DOCS)})" for it in others
    ]
    if words:
        yield f"* Clip and step elsewhere, times as fast as torch's fused AdamW. {'; '.join(words)}."
    what = "Clip and step in fp32 after only the imports have changed, times as fast"
    for machine in machines:
        if {IMPORTS, IMPORTS_CLIPPING} <= machine.groups.keys():
            text = f"{_ratios(machine, IMPORTS)}, and where each step clips {_ratios(machine, IMPORTS_CLIPPING)}"
            yield f"* {what}. {short(machine.run, machine.place)}: {text} ({samples(machine.names, FROM_DOCS)})."
    if of_models := [*map(_models, sorted((it for it in fused if not models.pinned_in(it)), reverse=True))]:
        what = "With `fuse(model)`, a training step's peak memory beside the weights, relative to without, uncompiled"
        yield f"* {what}. {' '.join(of_models)} GPT-2's `gelu_new` is eight ops in transformers, and one when fused."


def kept_bytes(runs: Iterable[Session]) -> dict[str, float]:
    """Return the bytes a parameter that each side keeps. A CPU's are exact; a GPU's memory comes in larger blocks."""
    kept: dict[str, float] = {}
    for run in sorted(runs, key=lambda it: not it.is_on_gpu):
        found = result_pictures.bytes_a_parameter(result_pictures.compared(run))
        kept |= {side: at_rest for side, (at_rest, _) in found.items()}
    return kept


def _beside_others(compared: dict[str, Session], kept: dict[str, float]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows. A column is left out if all of its measurements were disturbed by other programs."""
    shown = [pair for pair in BESIDE if kept.keys() >= {*pair}]
    columns: dict[str, list[str]] = {
        "AdamW": [f"{ours.partition(', ')[2]}; beside {RIVALS[theirs]}" for ours, theirs in shown],
        "bytes a parameter: ours / theirs": [
            f"{round(kept[ours], 2):g} / {round(kept[theirs], 2):g}" for ours, theirs in shown
        ],
    }
    for run, op, on_one in product(_gpus_first(compared), result_pictures.SHAPES, (False, True)):
        quiet = result_pictures.undisturbed(result_pictures.compared(run))
        column = [it for it in quiet if it.op == op and (it.place == "cpu-1") == on_one]
        if run.is_on_gpu:  # many tensors take the host's time
            column = [it for it in column if it.case == ONE]
        pairs = ([it for it in column if (result_pictures.side(it, True), it.baseline) == pair] for pair in shown)
        if column:
            where = short(run, place_of(run)) + ", one thread" * on_one + f", {ONE}" * run.is_on_gpu
            columns[f"times as fast: {op.replace('-', ' ')}, {where}"] = [*map(_ratio, pairs)]
    return [*columns], [list(row) for row in zip(*columns.values(), strict=True)]


def _gpus_first(compared: dict[str, Session]) -> list[Session]:
    return sorted(compared.values(), key=lambda it: not it.is_on_gpu)


def _sources(compared: dict[str, Session]) -> str:
    names = {id(run): name for name, run in compared.items()}
    return "; ".join(
        f"{short(it, place_of(it))}: {samples([names[id(it)]], 'results')}" for it in _gpus_first(compared)
    )


def short(run: Session, place: str) -> str:
    return SHORT.get(run.device, run.device) + _cores(run, place)


def _models(path: Path) -> str:
    """Return a machine's models that need less memory when they are fused, and how many others were measured."""
    found = json.loads(path.read_text())
    smaller = [it for it in found["rows"] if models.peak(it) < WORTH_A_WORD]
    words = ", ".join(
        f"{it['model']} {models.peak(it):.2f} at {median(models.ratios(it, 'theirs', 'ours')):.2f} times the speed "
        f"({it['dtype']})"
        for it in smaller
    )
    others = [median(models.ratios(it, "theirs", "ours")) for it in found["rows"] if it not in smaller]
    speeds = f" at {min(others):.2f} to {max(others):.2f} times the speed" if others else ""
    machine, chip = found["machine"], models.chip(found["machine"])
    where = SHORT.get(chip, chip) + ("" if machine.get("gpu") else f", {machine['cores']} cores")
    source = f"[samples]({FROM_DOCS}/models/{path.name})"
    return f"{where}: {words}; {WORTH_A_WORD} or more in {len(others)} others{speeds} ({source})."
