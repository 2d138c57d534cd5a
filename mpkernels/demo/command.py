"""The command: one model is trained in four ways side by side, then compared."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from mpkernels.bench.pairs import Samples, measure
from mpkernels.bench.settings import Place, Setting, Sizes
from mpkernels.bench.show import as_fast, busy
from mpkernels.bench.steps import compare_steps, fused
from mpkernels.demo import picture
from mpkernels.demo.training import BF16, FP32, OURS, OURS_8_BIT, SIZES, WAYS, Training, Way, sources

SILENCE = 20  # seconds, after which a training says that it goes on
SECONDS_OF_STEPS = 3.0  # that each comparison of the optimizers' steps takes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = ", ".join(f"{size.steps} on {device}" for device, size in SIZES.items())
    parser.add_argument("--steps", type=int, help=f"of each way; the default is {defaults}")
    folder = Path("mpkernels-demo")
    parser.add_argument("--out", type=Path, default=folder, metavar="DIR", help="the folder for demo.png")


def run(asked: argparse.Namespace, refuse: Callable[[str], Any]) -> int:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    steps = SIZES[device.type].steps if asked.steps is None else asked.steps
    if steps < 1:
        refuse(f"argument --steps: must be at least 1, got {steps}")
    with _folder(asked.out):
        _compare(device, steps, asked.out)
    return 0


@contextmanager
def _folder(path: Path) -> Iterator[None]:
    """Make a folder, and remove it in the end if nothing has come into it."""
    is_new = not path.exists()
    path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with suppress(OSError):  # it isn't empty
            if is_new:
                path.rmdir()


def _compare(device: torch.device, steps: int, out: Path) -> None:
    place = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"A transformer learns Python from its standard library's sources, in four ways, on {place}.")
    print(f"{steps} steps of each follow.", flush=True)
    draws = find_spec("matplotlib") is not None
    if not draws:
        print("No demo.png will be drawn: matplotlib is not installed (pip install 'mpkernels[demo]').", flush=True)
    text = sources(device)
    trainings = [Training(way, text, steps) for way in WAYS]
    train(trainings, steps)
    pairs = (OURS, FP32), (OURS_8_BIT, FP32), (OURS, BF16)
    ours, ours_8_bit, bf16 = (time_steps(trainings[0].model, *pair, SECONDS_OF_STEPS) for pair in pairs)
    if draws:
        times = {FP32: ours.theirs, BF16: bf16.theirs, OURS: ours.ours, OURS_8_BIT: ours_8_bit.ours}
        was_busy = " (this machine was busy)" * any(it.doubts() for it in (ours, ours_8_bit, bf16))
        picture.draw(trainings, times, f"One training, four ways, on {place}{was_busy}", out / "demo.png")
        print(f"Drawn: {out / 'demo.png'}")
    sizes = ", ".join(f"{it.way.name} {sum(it.bytes_per_parameter().values()):.1f}" for it in trainings)
    print(f"bytes a parameter: {sizes}")
    print(verdict(ours, ours_8_bit))


def train(trainings: Sequence[Training], steps: int) -> None:
    overflow, spoke = int(0.6 * steps), perf_counter()
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
            spoke = perf_counter()
        elif perf_counter() - spoke > SILENCE:
            print(f"step {step + 1}", flush=True)
            spoke = perf_counter()


def time_steps(model: torch.nn.Module, way: Way, theirs: Way, seconds: float) -> Samples:
    """Time steps with unscaling and clipping on a model of each way, by our optimizer and by torch's fused one, in
    turns."""
    shapes, device = tuple(tuple(param.shape) for param in model.parameters()), next(model.parameters()).device.type
    setting = Setting(Place(device, torch.get_num_threads()), "bf16", Sizes("demo", shapes))
    pair = compare_steps(setting, fused, "loop", weights=theirs.weights, state_dtype=way.moments)
    return measure(pair, device, seconds, builds=1)


def verdict(ours: Samples, ours_8_bit: Samples) -> str:
    """Say how much faster the optimizer's step is than torch's fused one, or that the samples don't tell."""
    if doubts := ours.doubts() or ours_8_bit.doubts():
        return f"{busy(doubts).capitalize()}; so it can't be told how fast the optimizer's step is beside torch's."
    fast, fast_8_bit = as_fast(ours.ratio()), as_fast(ours_8_bit.ratio())
    return f"The optimizer's step is {fast} as torch's fused one ({fast_8_bit} with 8-bit moments)."
