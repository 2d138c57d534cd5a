"""``python -m benchmarks``: measures all cases, and keeps raw samples in a file that a later call can continue."""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks import raw_samples
from benchmarks.cases import all_cases
from benchmarks.measuring import run_one
from mpkernels.bench import show
from mpkernels.bench.cases import Benchmark, select
from mpkernels.bench.command import SECONDS_OF_A_CASE, STOPPED, failure

FAILED = "failed, "  # begins the reason of each case that was tried
LOST = 3
HARDWARE = ("cpu", "simd", "cores", "gpu")  # facts that must be equal before two results are compared


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    words = "parts of cases' names, in this order; * stands for anything"
    parser.add_argument("--only", default=["*"], nargs="+", metavar="PATTERN", help=words)
    parser.add_argument("--without", default=[], nargs="+", metavar="PATTERN", help="leaves out what it names")
    parser.add_argument("--list", action="store_true", help="print the cases' names, measure nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keeps the raw samples, written after every case")
    parser.add_argument("--resume", action="store_true", help="measures only what --json's FILE does not hold yet")
    parser.add_argument("--compare", type=Path, metavar="OLD.json", help="with an earlier run on the same hardware")
    return parser


def chosen(arguments: argparse.Namespace) -> list[Benchmark]:
    benchmarks = all_cases()
    left_out = {it.name for it in select(benchmarks, arguments.without)}
    return [it for it in select(benchmarks, arguments.only) if it.name not in left_out]


def main(words: Sequence[str] | None = None) -> int:
    options = parser()
    arguments = options.parse_args(words)
    benchmarks = chosen(arguments)
    if not benchmarks:
        options.error(f"--only: no case's name has {' or '.join(map(repr, arguments.only))} in it; --list shows all")
    if arguments.list:
        print("\n".join(it.name + f"  (left out: {it.missing})" * bool(it.missing) for it in benchmarks))
        return 0
    session, old = raw_samples.Session(), None
    try:
        _check_output(arguments)
        old = _of_same("--compare", arguments.compare, session, HARDWARE) if arguments.compare else None
        if arguments.resume and arguments.json.exists():
            session = _of_same("--resume", arguments.json, session, session.machine)
    except (OSError, ValueError) as error:
        options.error(str(error))
    code = _measure_all(benchmarks, session, arguments.json)
    if old is not None:
        print(changes(old, session))
    return code


def _check_output(arguments: argparse.Namespace) -> None:
    if arguments.resume and not arguments.json:
        raise ValueError("--resume needs --json FILE")
    if arguments.json is None:
        return
    written = arguments.json.resolve()  # follows a link
    if written.exists() and not written.is_file():
        raise ValueError(f"--json: {arguments.json} is no file")
    if not written.parent.is_dir():
        raise ValueError(f"--json: no directory {arguments.json.parent}")
    if not all(os.access(it, os.W_OK) for it in (written, written.parent) if it.exists()):
        raise ValueError(f"--json: {arguments.json} can't be written")


def _of_same(option: str, path: Path, here: raw_samples.Session, keys: Iterable[str]) -> raw_samples.Session:
    try:
        there = raw_samples.read(path)
    except OSError as error:
        raise ValueError(f"{option}: {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from error
    if differing := there.other_machine(here, keys):
        raise ValueError(f"{option}: {path} was measured on another machine: {differing}")
    return there


def _measure_all(benchmarks: list[Benchmark], session: raw_samples.Session, path: Path | None) -> int:
    measured = {result.name for result in session.results}
    todo = [benchmark for benchmark in benchmarks if benchmark.name not in measured]
    todo.sort(key=lambda it: session.skipped.get(it.name, "").startswith(FAILED))  # cases that failed before come last
    keep = partial(raw_samples.write, path, session) if path else bool
    failed = False
    try:
        print(show.HEADER, flush=True)
        for number, benchmark in enumerate(todo, 1):
            if benchmark.missing:
                session.skipped[benchmark.name] = benchmark.missing
                continue
            print(f"{number}/{len(todo)} {benchmark.name}", file=sys.stderr, flush=True)
            if _try(benchmark, session, keep):
                print(show.line(session.results[-1]), flush=True)
            else:
                failed = True
                if _device_is_lost(benchmark.setting.place.device):
                    print("CUDA is lost to this process: --resume measures the rest in another")
                    return LOST
    except KeyboardInterrupt:
        print("stopped; measured so far:")
        return STOPPED
    finally:
        print(show.summary(session))
        keep()
    return int(failed)


def _try(benchmark: Benchmark, session: raw_samples.Session, keep: Callable[[], object]) -> bool:
    """Return whether the case was measured. A case that ends the whole process leaves a note."""
    reason = session.skipped.get(benchmark.name)  # why an earlier run skipped the case
    session.skipped[benchmark.name] = f"{FAILED}it did not end"
    keep()
    try:
        run_one(benchmark, session, SECONDS_OF_A_CASE)
        reason = None
    except Exception as error:
        reason = failure(error)
    finally:
        del session.skipped[benchmark.name]
        if reason is not None:
            session.skipped[benchmark.name] = reason
        keep()
    return reason is None


def _device_is_lost(device: str) -> bool:
    """Return whether an error, such as an illegal access, has left this process a CUDA context that does nothing."""
    try:
        if device == "cuda":
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def changes(old: raw_samples.Session, new: raw_samples.Session) -> str:
    """Return a line for each case that both sessions have measured: how its ratio has changed."""
    before = {result.name: result.ratio for result in old.results}
    lines = []
    for result in new.results:
        if result.name in before:
            was, now = before[result.name], result.ratio
            apart = "  changed" if now.low > was.high or now.high < was.low else ""
            lines.append(f"{result.name:58} {was.median:.2f} -> {now.median:.2f} x torch{apart}")
    return "\n".join([f"beside {old.date}, mpkernels {old.machine.get('mpkernels')}:", *lines])


if __name__ == "__main__":
    sys.exit(main())
