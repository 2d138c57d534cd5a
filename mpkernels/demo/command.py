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

from mpkernels.bench.pairs import Samples
from mpkernels.bench.show import figure
from mpkernels.demo import picture
from mpkernels.demo.corpus import Corpus
from mpkernels.demo.model import SIZES
from mpkernels.demo.training import BF16, FP32, OURS, OURS_8_BIT, WAYS, Training, time_steps

STEPS = 500  # of each way, where there is time
ENOUGH = 90.0  # seconds of training
FIRST, FEWEST = 4, 20  # steps that are tried to see how many there is time for; the fewest
SECONDS_OF_STEPS = 3.0  # for each comparison of the optimizers' steps
BUSY = """\
How fast the optimizer's step is beside torch's fused one can't be told: other programs were at work, and
threads waited for a core {:.0%} of the time."""


def steps(text: str) -> int:
    if not text.isdecimal() or int(text) < FIRST:
        raise argparse.ArgumentTypeError(f"must be a whole number from {FIRST} on, got {text!r}")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    of_each = f"of each way; the default is what {ENOUGH:.0f} s hold, {STEPS} at most"
    parser.add_argument("--steps", type=steps, help=of_each)
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
        return 130  # as shells have it
    return 0


def compare(asked: int | None, path: Path) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    place = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(
        f"A transformer learns Python from the sources of its standard library, in four ways, on {place}.", flush=True
    )
    corpus = Corpus(device)
    steps = asked or count_steps(device, corpus)
    trainings = [Training(way, SIZES[device.type], device, steps) for way in WAYS]
    train(trainings, corpus, steps)
    shapes = [tuple(it.shape) for it in trainings[0].model.parameters()]
    timed = [time_steps(shapes, way, device, SECONDS_OF_STEPS) for way in (OURS, OURS_8_BIT)]
    if find_spec("matplotlib") is None:
        print("No demo.png: matplotlib is not installed (pip install 'mpkernels[demo]').")
    else:
        times = {FP32: timed[0].theirs, OURS: timed[0].ours, OURS_8_BIT: timed[1].ours}
        picture.draw(trainings, times, f"One training, four ways, on {place}", path)
        print(f"Drawn: {path}")
    print(verdict(trainings, *timed))


def count_steps(device: torch.device, corpus: Corpus) -> int:
    """Return how many steps of each way there is time for. The first steps are tried, on models of their own."""
    trainings, size, began = [Training(way, SIZES[device.type], device, FIRST) for way in WAYS], SIZES[device.type], 0.0
    for step in range(FIRST):
        for it in trainings:
            it.step(*corpus.batch(step, size.batch, size.context))
        began = began or perf_counter()  # the first step takes longer
    steps = int(ENOUGH / (perf_counter() - began) * (FIRST - 1))
    return max(FEWEST, min(STEPS, steps))


def train(trainings: Sequence[Training], corpus: Corpus, steps: int) -> None:
    print(f"{steps} steps of each follow.", flush=True)
    size, overflow = SIZES[trainings[0].device.type], int(0.6 * steps)
    held_out = [corpus.batch(i, size.batch, size.context, held_out=True) for i in range(8)]
    for step in range(steps):
        for it in trainings:
            it.step(*corpus.batch(step, size.batch, size.context), overflows=step == overflow)
        if step == overflow:
            print(f"In step {step + 1} a grad was given an inf. What mpkernels says of it:")
            print("\n".join(str(trainings[-1].scaler.overflow_report(trainings[-1].model)).splitlines()[:3]))
        if (step + 1) % -(-steps // 10) == 0 or step == steps - 1:
            for it in trainings:
                it.evaluate(step + 1, held_out)
            losses = ", ".join(f"{it.way.name} {it.held_out[-1][1]:.3f}" for it in trainings)
            print(f"step {step + 1}, held-out losses: {losses}", flush=True)


def verdict(trainings: Sequence[Training], timed: Samples, timed_8: Samples) -> str:
    """Say what was gained: speed of the optimizer's step, memory; and that the loss is that of fp32 weights."""
    sizes = {it.way: sum(it.bytes_per_parameter().values()) for it in trainings}
    smaller, smaller_8 = (sizes[way] / sizes[FP32] for way in (OURS, OURS_8_BIT))
    losses = {it.way: it.held_out[-1][1] for it in trainings}
    return f"""
1. {speed(timed, timed_8)}
2. Weights, grads and states take {smaller:.2f} of torch.amp's bytes ({smaller_8:.2f} with 8-bit moments).
3. The held-out loss is {losses[OURS]:.3f} ({losses[OURS_8_BIT]:.3f} with 8-bit moments). With fp32 weights it is
   {losses[FP32]:.3f}, with bf16 weights and torch's AdamW {losses[BF16]:.3f}."""


def speed(timed: Samples, timed_8: Samples) -> str:
    """Say how much faster the step is, as far as the samples tell."""
    times, times_8 = (figure(it.ratio(), it.doubts()) for it in (timed, timed_8))
    if times is None or times_8 is None:
        return BUSY.format(max(timed.waited, timed_8.waited))
    ours, torchs = (1e3 * median(seconds) for seconds in (timed.ours, timed.theirs))
    return (
        f"The optimizer's step is {f'{times} times ' * bool(times)}as fast as torch's fused one "
        f"({times_8 or 'as fast'} with 8-bit moments):\n"
        f"   {ours:.1f} ms, torch takes {torchs:.1f}, with unscaling and clipping."
        f"{' The samples are wide.' * bool(timed.doubts())}"
    )
