"""``python -m mpkernels bench``."""

import argparse
import signal
import sys
from collections.abc import Callable
from itertools import product
from time import perf_counter

from mpkernels.bench import show
from mpkernels.bench.cases import Benchmark, all_cases, quick, select
from mpkernels.bench.measuring import run_one
from mpkernels.bench.pairs import BUILDS
from mpkernels.bench.results import Session

QUICK_SECONDS = 50.0  # for turns; what comes before and after takes some seconds more
SECONDS_OF_A_CASE = 2.5
# Other programs disturb a machine for seconds at a time. Several turns, apart in time, meet different moments.
QUICK_TURNS, SECONDS_OF_A_TURN = 4, 0.9
STOPPED = 128 + signal.SIGINT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="the cases that say the most, in a minute")
    words = "parts of cases' names, in this order; * stands for anything"
    parser.add_argument("--only", default=["*"], nargs="+", metavar="PATTERN", help=words)
    parser.add_argument("--list", action="store_true", help="print the cases' names, measure nothing")


def run(arguments: argparse.Namespace, refuse: Callable[[str], None]) -> int:
    """Run the command. ``refuse`` says what is wrong with the arguments, and ends the program."""
    chosen = select(all_cases(), arguments.only)
    chosen = quick(chosen) if arguments.quick else chosen
    if not chosen:
        refuse(f"--only: no case's name has {' or '.join(map(repr, arguments.only))} in it; --list shows all")
    if arguments.list:
        print("\n".join(it.name for it in chosen))
        return 0
    session = Session()
    print(show.HEADER, flush=True)
    try:
        code = _in_turns(chosen, session) if arguments.quick else _one_by_one(chosen, session)
    except KeyboardInterrupt:
        code = STOPPED
        print("stopped; measured so far:")
    if arguments.quick:
        print("\n".join(map(show.line, session.results)))
    print(show.summary(session))
    return code


def _in_turns(chosen: list[Benchmark], session: Session) -> int:
    """Measure cases in turns as long as a case's longest turn still fits. A new case is taken to last as long as the
    longest so far."""
    began, code = perf_counter(), 0
    longest: dict[str, float] = {}
    for turn, benchmark in product(range(QUICK_TURNS), chosen):
        start, name = perf_counter(), benchmark.name
        if start - began + longest.get(name, max(longest.values(), default=0.0)) > QUICK_SECONDS:
            if turn == 0:
                session.skipped[name] = "the minute of --quick is over"
            continue
        print(f"turn {turn + 1} of {QUICK_TURNS}: {name}", file=sys.stderr, flush=True)
        code |= _measure(benchmark, session, SECONDS_OF_A_TURN, builds=1)
        longest[name] = max(perf_counter() - start, longest.get(name, 0.0))
    return code


def _one_by_one(chosen: list[Benchmark], session: Session) -> int:
    code = 0
    for benchmark in chosen:
        if _measure(benchmark, session, SECONDS_OF_A_CASE, BUILDS):
            code = 1
        else:
            print(show.line(session.results[-1]), flush=True)
    return code


def _measure(benchmark: Benchmark, session: Session, seconds: float, builds: int) -> int:
    """Return 1 if the case fails with any error, so that the other cases are still measured."""
    try:
        session.add(run_one(benchmark, seconds, builds))
    except Exception as error:
        session.skipped[benchmark.name] = failure(error)
        return 1
    return 0


def failure(error: Exception) -> str:
    return f"failed, {type(error).__name__}: {str(error).partition(chr(10))[0]}"
