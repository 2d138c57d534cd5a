"""The command: one model is trained in four ways side by side, then compared."""

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from mpkernels.demo import optimizer_step, picture, report
from mpkernels.demo.corpus import Corpus
from mpkernels.demo.model import SIZES
from mpkernels.demo.training import WAYS, Training

SEED = 0
STEPS = 500  # of each, where there is time
ENOUGH = 90.0  # seconds of training
FIRST = 4  # steps, from whose time the number of steps follows
FEWEST = 20
EVALUATIONS = 10
HELD_OUT = 8  # batches
OVERFLOWS_AT = 0.6  # of all steps


def steps(text: str) -> int:
    if not text.isdecimal() or int(text) <= FIRST:
        raise argparse.ArgumentTypeError(f"must be a whole number above {FIRST}, got {text!r}")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--steps", type=steps, help=f"of each way; the default is what {ENOUGH:.0f} s hold, {STEPS} at most"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("mpkernels-demo"), metavar="DIR", help="the folder for demo.png"
    )


def run(asked: argparse.Namespace, refuse: Callable[[str], Any]) -> int:
    try:
        asked.out.mkdir(parents=True, exist_ok=True)
        (asked.out / "demo.png").unlink(missing_ok=True)
    except OSError as error:
        refuse(f"{error.filename}: {error.strerror}")
    try:
        return Run(asked.steps, asked.out / "demo.png").go()
    except torch.OutOfMemoryError as error:
        print(f"mpkernels demo: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("mpkernels demo: interrupted, nothing was drawn", file=sys.stderr)
        return 130  # as shells have it


class Run:
    def __init__(self, steps: int | None, path: Path) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.corpus, self.size = Corpus(self.device, SEED), SIZES[self.device.type]
        self.trainings = [Training(way, self.size, self.device, SEED) for way in WAYS]
        self.asked, self.path = steps, path

    def go(self) -> int:
        parameters = sum(it.numel() for it in self.trainings[0].model.parameters())
        print(report.introduction(self.device, self.corpus.size, parameters), flush=True)
        for it in self.trainings:
            it.rehearse(*self.batch(0))
        start = perf_counter()
        for step in range(FIRST):
            self.step(step)
        seconds = (perf_counter() - start) / FIRST
        steps = self.asked or max(FEWEST, min(STEPS, int(ENOUGH / seconds)))
        print(report.plan(steps - FIRST, (steps - FIRST) * seconds), flush=True)
        self.train(steps)
        timed = optimizer_step.measure(self.trainings)
        picture.draw(self.trainings, timed, self.path)
        print(report.figures(self.trainings, timed))
        if self.path.exists():
            print(f"Drawn: {self.path}")
        return 0

    def train(self, steps: int) -> None:
        overflow, pause = max(FIRST, int(OVERFLOWS_AT * steps)), math.ceil(steps / EVALUATIONS)
        for it in self.trainings:
            it.steps = steps
        with report.live(steps) as show:
            for step in range(FIRST, steps):
                self.step(step, overflows=step == overflow)
                if step % pause == pause - 1 or step == steps - 1:
                    for it in self.trainings:
                        it.evaluate(step + 1, [self.batch(i, held_out=True) for i in range(HELD_OUT)])
                    show(self.trainings)
        ours = self.trainings[-1]
        print(f"\nIn step {overflow + 1} a grad was given an inf. What mpkernels says of it:\n{ours.overflow_report()}")

    def step(self, step: int, overflows: bool = False) -> None:
        for it in self.trainings:
            it.step(*self.batch(step), overflows=overflows)

    def batch(self, step: int, held_out: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        return self.corpus.batch(step, self.size.batch, self.size.context, held_out)
