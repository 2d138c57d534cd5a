"""README's figures and its rows of results: of each machine, the newest of each row."""

from statistics import median
from typing import NamedTuple

from benchmarks.raw import Session
from mpkernels.bench.results import Result

STEP = "the optimizer's step, with unscaling and clipping, beside torch's fused AdamW"
ROWS = {
    STEP: "step vs torch.amp fused",
    "the same with 8-bit moments": "step moments-8bit vs torch.amp fused",
    "clipping and step without a scaler: `AdamW(max_norm=...)`": "step vs torch fused",
    "the same calls, only the imports changed": "step imports vs torch fused",
    "the same where each step clips": "step imports-clipping vs torch fused",
    "clipping and step without a scaler: `Adam(max_norm=...)`": "step adam vs torch fused",
    "likewise `SGD(momentum=0.9, max_norm=...)`": "step sgd-momentum vs torch fused",
    "likewise `Lion(max_norm=...)`, beside torch-optimi's": "step lion vs torch-optimi",
    "a training step with bf16 weights, beside torch.amp with fused AdamW": "train split-master vs torch.amp fused",
    "the same with fp32 weights under autocast, as torch.amp has them": "train vs torch.amp fused",
    "a linear layer and its activation under autocast": "linear_act vs torch.amp eager",
    "the norm of all grads, and whether they are finite": "grad_stats vs torch",
}


class Front(NamedTuple):
    """A machine as README shows it."""

    names: list[str]  # of its raw files
    run: Session  # the newest
    groups: dict[str, list[Result]]  # by what is compared with what
    on_one_thread: dict[str, list[Result]]  # likewise; empty where that is all there is


def figures(runs: list[Front]) -> list[str]:
    """Return one figure for each machine that has measured it."""
    return [f"  * {_ratios(it, ROWS[STEP])}, on {_machine(it)}" for it in runs if ROWS[STEP] in it.groups]


def rows(runs: list[Front]) -> tuple[list[str], list[list[str]]]:
    """Return the header and the cells of README's table."""
    header = ["times torch's speed: median (least to most) of all cases", *map(_machine, runs)]
    return header, [[name, *(_ratios(it, title) for it in runs)] for name, title in ROWS.items()]


def place_of(run: Session) -> str:
    """Return the run's GPU, or all of its cores."""
    return max({result.place for result in run.results}, key=lambda it: (it == "cuda", len(it), it))


def _machine(it: Front) -> str:
    run, place = it.run, place_of(it.run)
    threads, cores = place.removeprefix("cpu-"), run.machine.get("cores")
    of_all = f" of {cores}" if cores and str(cores) != threads else ""
    used = "" if place == "cuda" else f", {threads}{of_all} cores"
    name = f"{run.device.replace('(R)', '')}{used}, torch {run.machine['torch']}"
    return f"{name} ({', '.join(f'[samples](benchmarks/results/{it}.json)' for it in it.names)})"


def _ratios(it: Front, title: str) -> str:
    one = it.on_one_thread.get(title)
    return _ratio(it.groups.get(title, [])) + (f"; one thread {_ratio(one)}" if one else "")


def _ratio(found: list[Result]) -> str:
    if not found:
        return "not measured"
    ratios = sorted(it.ratio.median for it in found)
    spread = f" ({ratios[0]:.2f} to {ratios[-1]:.2f})" if len(ratios) > 1 else ""
    return f"**{median(ratios):.2f}**{spread}"
