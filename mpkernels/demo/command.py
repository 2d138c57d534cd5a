"""The command: what it was asked for, the run, and what is left of it when it is stopped."""

import argparse
import math
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from mpkernels.amp import Policy
from mpkernels.demo import checkpoint, report
from mpkernels.demo.corpus import Corpus
from mpkernels.demo.model import SIZES
from mpkernels.demo.training import DTYPES, SIDES, Training

SEED = 0
STEPS = 400  # a minute on two cores
ENOUGH = 80.0  # seconds; where nobody has asked for a number of steps, no slice is begun after them
SLICE = 5  # steps of one side before the other's turn
SAVE_EVERY = 10  # slices
STOPPED = 130  # as shells have it for Ctrl-C


def steps(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text!r}")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--precision", choices=DTYPES, help="of the training; the default is what suits the machine best"
    )
    parser.add_argument("--steps", type=steps, help=f"of each; the default is {STEPS}, or what {ENOUGH:.0f} s hold")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument(
        "--out", type=Path, default=Path("mpkernels-demo"), metavar="DIR", help="where demo.png and demo.pt go"
    )


def run(asked: argparse.Namespace, refuse: Callable[[str], Any]) -> int:
    try:
        try:
            it = Run(asked)
        except (checkpoint.UnusableError, OSError) as error:
            refuse(in_a_line(error))
        return it.go()
    except BrokenPipeError:
        raise
    except (OSError, torch.OutOfMemoryError) as error:
        print(f"mpkernels demo: {in_a_line(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("mpkernels demo: interrupted", file=sys.stderr)
        return STOPPED


def in_a_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'disk'}: {error.strerror}"
    return str(error).splitlines()[0]


def best_precision(device: torch.device) -> str:
    best = Policy.best(device).compute_dtype
    return next(name for name, dtype in DTYPES.items() if dtype == best)


class Run:
    def __init__(self, asked: argparse.Namespace) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.out, self.path = asked.out, asked.out / "demo.pt"
        self.corpus, self.size = Corpus(self.device, SEED), SIZES[self.device.type]
        saved = None
        if asked.resume:
            saved = checkpoint.load(self.path)
            self.check(saved, asked.precision)
        else:
            self.out.mkdir(parents=True, exist_ok=True)
        planned = saved or {"precision": asked.precision or best_precision(self.device), "steps": STEPS}
        self.seconds = ENOUGH if asked.steps is None else math.inf
        self.precision, self.steps = planned["precision"], asked.steps or planned["steps"]
        self.sides = [Training(side, self.size, self.precision, self.device, SEED) for side in SIDES]
        if saved is not None:
            self.restore(saved)
        self.save(is_first=saved is None)  # now, so that a place that can't be written to costs no training

    def facts(self) -> dict[str, Any]:
        """What must be the same for a run to go on."""
        return {"size": list(self.size), "corpus": self.corpus.digest, "device": self.device.type}

    def check(self, saved: dict[str, Any], precision: str | None) -> None:
        for name, value in (self.facts() | {"precision": precision or saved.get("precision")}).items():
            if saved.get(name) != value:
                raise checkpoint.UnusableError(f"--resume: {self.path} is of a run with another {name}")

    def restore(self, saved: dict[str, Any]) -> None:
        try:
            for side in self.sides:
                side.load_state_dict(saved[side.side])
        except (KeyError, ValueError, RuntimeError, TypeError):
            raise checkpoint.UnusableError(f"--resume: {self.path} is damaged") from None

    def save(self, is_first: bool = False) -> None:
        state = self.facts() | {"precision": self.precision, "steps": self.steps}
        checkpoint.save(self.path, state | {side.side: side.state_dict() for side in self.sides}, is_first)

    def go(self) -> int:
        parameters = sum(it.numel() for it in self.sides[0].model.parameters())
        print(report.introduction(self.device, self.corpus.size, parameters, self.precision, self.steps), flush=True)
        end_of_time = perf_counter() + self.seconds
        with until_interrupted() as interrupted, report.live(self.steps) as show:
            for number, (first, end) in enumerate(self.slices()):
                batches = [self.corpus.batch(step, self.size.batch, self.size.context) for step in range(first, end)]
                for side in self.sides if number % 2 else reversed(self.sides):
                    side.train(batches)
                show(self.sides)
                if number % SAVE_EVERY == SAVE_EVERY - 1 or interrupted():
                    self.save()
                if interrupted():
                    break
                if perf_counter() > end_of_time:
                    self.steps = self.done
        self.save()
        return self.finish(is_whole=self.done >= self.steps)

    @property
    def done(self) -> int:
        return len(self.sides[0].losses)

    def slices(self) -> Iterator[tuple[int, int]]:
        """The first step is a slice of its own: memory is counted there, and its time is nobody's."""
        while self.done < self.steps:
            end = (self.done // SLICE + 1) * SLICE if self.done else 1
            yield self.done, min(end, self.steps)

    def finish(self, is_whole: bool) -> int:
        held_out = [self.corpus.batch(i, self.size.batch, self.size.context, held_out=True) for i in range(4)]
        print(report.table(self.sides, [side.evaluate(held_out) for side in self.sides]))
        report.plot(self.sides, self.out / "demo.png")
        if not is_whole:
            print(f"Stopped after {self.done} of {self.steps} steps. To go on:")
            print(f"python -m mpkernels demo --resume --out {self.out}")
            return STOPPED
        print(report.sample(self.sides[-1]))
        return 0


@contextmanager
def until_interrupted() -> Iterator[Any]:
    """The first Ctrl-C is noted, and the slice is brought to its end; a second one is Python's."""
    seen: list[int] = []

    def note(number: int, frame: object) -> None:
        seen.append(number)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGINT, before)
