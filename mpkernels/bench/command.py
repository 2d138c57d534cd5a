"""``python -m mpkernels bench``."""

import argparse
import importlib.util
import math
import os
import signal
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from mpkernels.bench import machine, plot, results, show
from mpkernels.bench.cases import Benchmark, all_cases, select
from mpkernels.bench.clock import Clock
from mpkernels.bench.measuring import run_one
from mpkernels.bench.pairs import BUILDS

FAILED = "failed, "  # how the reasons begin for which a case that was tried was left out
QUICK_SECONDS = 50.0  # in which all that is begun should end: what comes before and after takes some seconds more
SECONDS_OF_A_CASE = 2.5
# What a machine does beside the benchmark lasts for some seconds. Who comes back later meets another moment.
QUICK_TURNS, SECONDS_OF_A_TURN = 4, 0.9
PLOTS = (".png", ".svg", ".pdf")
QUICK_PLOT = Path("mpkernels-bench.png")
STOPPED, LOST = 128 + signal.SIGINT, 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"the cases that say the most, in a minute, and their picture, {QUICK_PLOT}",
    )
    pattern: dict[str, Any] = {"nargs": "+", "metavar": "PATTERN"}
    parser.add_argument("--only", default=["*"], help="parts of cases' names, in this order; * is anything", **pattern)
    parser.add_argument("--without", default=[], help="leaves out what it names", **pattern)
    parser.add_argument("--list", action="store_true", help="the cases' names, nothing is measured")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keeps the raw samples, written after every case")
    parser.add_argument("--resume", action="store_true", help="measures only what --json's FILE does not hold yet")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a picture of the ratios, as .png, .svg or .pdf")
    parser.add_argument("--compare", type=Path, metavar="OLD.json", help="with an earlier run on the same hardware")


def run(arguments: argparse.Namespace, refuse: Callable[[str], None]) -> int:
    """``refuse`` says what is wrong with the arguments, and ends the program: before anything is measured."""
    run, old = results.start(), None
    benchmarks = select(all_cases(), arguments.only, arguments.without, arguments.quick)
    if not benchmarks:
        refuse(f"--only: no case's name has {' or '.join(map(repr, arguments.only))} in it; --list shows all")
    if arguments.list:
        print("\n".join(it.name + f"  (left out: {it.missing})" * bool(it.missing) for it in benchmarks))
        return 0
    try:
        arguments.plot = arguments.plot or _plot_of_quick(arguments.quick)
        _check_outputs(arguments)
        old = _of_same("--compare", arguments.compare, run, machine.HARDWARE) if arguments.compare else None
        if arguments.resume and arguments.json.exists():
            run = _of_same("--resume", arguments.json, run, run.machine)
    except (OSError, ValueError) as error:
        refuse(str(error))
    code = _measure_all(benchmarks, run, arguments)
    if old is not None:
        print(show.changes(old, run))
    if arguments.plot and run.results:
        plot.draw(run, arguments.plot)
        print(f"the picture: {arguments.plot}")
    return code


def _plot_of_quick(is_quick: bool) -> Path | None:
    can_draw = importlib.util.find_spec("matplotlib") is not None and os.access(".", os.W_OK)
    return QUICK_PLOT if is_quick and can_draw else None


def _check_outputs(arguments: argparse.Namespace) -> None:
    if arguments.resume and not arguments.json:
        raise ValueError("--resume needs --json FILE")
    if arguments.resume and arguments.quick:  # which measures a case in turns, and may have been stopped between them
        raise ValueError("--resume does not go with --quick")
    if arguments.plot and arguments.plot.suffix not in PLOTS:
        raise ValueError(f"--plot: {arguments.plot} must end in {', '.join(PLOTS)}")
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install 'mpkernels[bench]'")
    for option, path in (("--json", arguments.json), ("--plot", arguments.plot)):
        if path is None:
            continue
        written = path.resolve()  # where a link leads
        if written.exists() and not written.is_file():
            raise ValueError(f"{option}: {path} is no file")
        if not written.parent.is_dir():
            raise ValueError(f"{option}: no directory {path.parent}")
        if not all(os.access(it, os.W_OK) for it in (written, written.parent) if it.exists()):
            raise ValueError(f"{option}: {path} can't be written")


def _of_same(option: str, path: Path, here: results.Run, keys: Iterable[str]) -> results.Run:
    try:
        there = results.read(path)
    except OSError as error:
        raise ValueError(f"{option}: {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from error
    if differing := there.other_machine(here, keys):
        raise ValueError(f"{option}: {path} was measured on another machine: {differing}")
    return there


def _measure_all(benchmarks: list[Benchmark], run: results.Run, arguments: argparse.Namespace) -> int:
    clock, failed = Clock(QUICK_SECONDS if arguments.quick else math.inf), False
    known = {result.name for result in run.results}
    todo = [benchmark for benchmark in benchmarks if benchmark.name not in known]
    todo.sort(key=lambda it: run.skipped.get(it.name, "").startswith(FAILED))  # what failed before comes last
    keep = partial(results.write, arguments.json, run) if arguments.json else bool
    turns, seconds, builds = (QUICK_TURNS, SECONDS_OF_A_TURN, 1) if arguments.quick else (1, SECONDS_OF_A_CASE, BUILDS)
    try:
        with show.progress(len(todo) * turns) as (say, measuring):
            say(show.HEADER, "bold")
            for turn, benchmark in product(range(turns), todo):
                measuring(benchmark.name)
                if reason := benchmark.missing or clock.why_not(benchmark.name):
                    if turn == 0:
                        run.skipped[benchmark.name] = reason
                    continue
                with clock.turn(benchmark.name):
                    result = _try(benchmark, run, seconds, builds, keep)
                if result is None:
                    failed = True
                    if _device_is_lost(benchmark.setting.place.device):
                        print("CUDA is lost to this process: --resume measures the rest in another")
                        return LOST
                    continue
                if turn == 0:
                    run.skipped.pop(benchmark.name, None)  # an earlier run's
                if turns == 1:
                    say(show.line(result, run), show.colour(result))
    except KeyboardInterrupt:
        print("stopped; measured so far:")
        return STOPPED
    finally:
        if turns > 1:
            for result in run.results:
                say(show.line(result, run), show.colour(result))
        print(show.summary(run))
        keep()
    return int(failed)


def _try(
    benchmark: Benchmark, run: results.Run, seconds: float, builds: int, keep: Callable[[], object]
) -> results.Result | None:
    """Return its result, or None where it failed: the others can still be measured. One that takes the process with it
    leaves a note."""
    reason = run.skipped.get(benchmark.name)
    run.skipped[benchmark.name] = f"{FAILED}it did not end"
    keep()
    try:
        return run_one(benchmark, run, seconds, builds)
    except Exception as error:
        reason = f"{FAILED}{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return None
    finally:
        del run.skipped[benchmark.name]
        if reason is not None:
            run.skipped[benchmark.name] = reason
        keep()


def _device_is_lost(device: str) -> bool:
    """Return whether an error, such as an illegal access, has left this process a CUDA context that does nothing."""
    try:
        if device == "cuda":
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
