"""The command: one model is trained in four ways side by side, then compared."""

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from mpkernels.bench.pairs import Samples, measure
from mpkernels.bench.settings import Place, Setting, Sizes
from mpkernels.bench.show import as_fast, busy
from mpkernels.bench.steps import compare_steps, fused
from mpkernels.demo import picture
from mpkernels.demo.model import sources
from mpkernels.demo.training import BF16, FP32, OURS, OURS_8_BIT, WAYS, Training, Way

STEPS, FEWEST = 500, 20  # how many steps each way takes, and the fewest
ENOUGH = 90.0  # seconds that all trainings may take
FIRST = 4  # steps that are timed to see how many fit
SECONDS_OF_STEPS = 3.0  # that each comparison of the optimizers' steps takes


def number_of_steps(text: str) -> int:
    if not text.isdecimal() or int(text) < FIRST:
        raise argparse.ArgumentTypeError(f"must be a whole number from {FIRST} on, got {text!r}")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    words = f"of each way; the default is what {ENOUGH:.0f} s hold, {STEPS} at most"
    parser.add_argument("--steps", type=number_of_steps, help=words)
    folder = Path("mpkernels-demo")
    parser.add_argument("--out", type=Path, default=folder, metavar="DIR", help="the folder for demo.png")


def run(asked: argparse.Namespace, refuse: Callable[[str], Any]) -> int:
    path = asked.out / "demo.png"
    try:
        asked.out.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
    except OSError as error:
        refuse(f"{error.filename}: {error.strerror}")
    try:
        compare(asked.steps, path)
    except KeyboardInterrupt:
        print("mpkernels demo: interrupted, nothing was drawn", file=sys.stderr)
        return 130  # a shell's status after Ctrl-C
    return 0


def compare(asked: int | None, path: Path) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    place = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"A transformer learns Python from its standard library's sources, in four ways, on {place}.", flush=True)
    text = sources(device)
    if asked is None:
        print(f"The first steps tell how many {ENOUGH:.0f} seconds hold.", flush=True)
    steps = asked or count_steps(text)
    print(f"{steps} steps of each follow.", flush=True)
    trainings = [Training(way, text, steps) for way in WAYS]
    train(trainings, steps)
    ours, ours_8_bit = (time_steps(trainings[0].model, way, SECONDS_OF_STEPS) for way in (OURS, OURS_8_BIT))
    if find_spec("matplotlib") is None:
        print("No demo.png: matplotlib is not installed (pip install 'mpkernels[demo]').")
    else:
        times = {FP32: ours.theirs, OURS: ours.ours, OURS_8_BIT: ours_8_bit.ours}
        was_busy = " (this machine was busy)" * bool(ours.doubts() or ours_8_bit.doubts())
        picture.draw(trainings, times, f"One training, four ways, on {place}{was_busy}", path)
        print(f"Drawn: {path}")
    print(verdict(trainings, ours, ours_8_bit))


def count_steps(text: Tensor) -> int:
    """Return how many steps of each way fit into the time. Takes a few steps on extra models and times the last."""
    trainings, seconds = [Training(way, text, FIRST) for way in WAYS], 0.0
    for step in range(FIRST):
        began = perf_counter()
        for training in trainings:
            training.step(step)
        seconds = perf_counter() - began
    return max(FEWEST, min(STEPS, int(ENOUGH / seconds)))


def train(trainings: Sequence[Training], steps: int) -> None:
    overflow = int(0.6 * steps)
    for step in range(steps):
        for training in trainings:
            training.step(step, overflows=step == overflow)
        if step == overflow:
            print(f"In step {step + 1} a grad was given an inf. What mpkernels says of it:")
            print("\n".join(str(trainings[-1].scaler.overflow_report(trainings[-1].model)).splitlines()[:3]))
        if (step + 1) % -(-steps // 10) == 0 or step == steps - 1:
            for training in trainings:
                training.evaluate(step + 1)
            losses = ", ".join(f"{it.way.name} {it.losses[step + 1]:.3f}" for it in trainings)
            print(f"step {step + 1}, held-out losses: {losses}", flush=True)


def time_steps(model: torch.nn.Module, way: Way, seconds: float) -> Samples:
    """Time steps with unscaling and clipping on a model of this way, by our optimizer and by torch's fused one, in
    turns."""
    shapes, device = tuple(tuple(it.shape) for it in model.parameters()), next(model.parameters()).device.type
    setting = Setting(Place(device, torch.get_num_threads()), "bf16", Sizes("demo", shapes))
    return measure(compare_steps(setting, fused, "loop", state_dtype=way.moments), device, seconds, builds=1)


def verdict(trainings: Sequence[Training], ours: Samples, ours_8_bit: Samples) -> str:
    """Say how much faster the optimizer's step is, how much memory is saved, and that the loss is as in fp32."""
    sizes = {it.way: sum(it.bytes_per_parameter().values()) for it in trainings}
    losses = {it.way: [*it.losses.values()][-1] for it in trainings}
    return f"""
1. {speed(ours, ours_8_bit)}
2. Weights, grads and states take {sizes[OURS] / sizes[FP32]:.2f} of torch.amp's bytes \
({sizes[OURS_8_BIT] / sizes[FP32]:.2f} with 8-bit moments).
3. The held-out loss is {losses[OURS]:.3f} ({losses[OURS_8_BIT]:.3f} with 8-bit moments). With fp32 weights it is
   {losses[FP32]:.3f}, with bf16 weights and torch's AdamW {losses[BF16]:.3f}."""


def speed(ours: Samples, ours_8_bit: Samples) -> str:
    """Say how much faster the optimizer's step is, or that the samples don't tell."""
    if doubts := ours.doubts() or ours_8_bit.doubts():
        said = busy(doubts).capitalize()
        return f"{said};\n   so it can't be told how fast the optimizer's step is beside torch's fused one."
    milliseconds = (1e3 * median(seconds) for seconds in (ours.ours, ours.theirs))
    return (
        f"The optimizer's step is {as_fast(ours.ratio())} as torch's fused one "
        f"({as_fast(ours_8_bit.ratio())} with 8-bit moments):\n"
        "   {:.1f} ms, torch takes {:.1f}, with unscaling and clipping.".format(*milliseconds)
    )
