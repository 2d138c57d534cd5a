"""Runs the compile gate: measures every kernel, compares with the tables, or rewrites these with ``--update``."""

import argparse
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import triton

import setup
from tests import targets
from tests.proof.gate import launches, limits, measure, traced, traces
from tests.proof.gate.chips import CODES
from tests.proof.gate.limits import Kernels, Section
from tests.proof.gate.memory_bound_calls import CASES
from tests.proof.gate.traces import Traces


class Job(NamedTuple):
    compiler: str
    name: str
    measure: Callable[..., Any]
    arguments: tuple[Any, ...]


Begun = tuple[Job, Future[Any]]


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.proof.gate", description="Compile every kernel for every chip.")
    parser.add_argument("--update", action="store_true", help="rewrite the tables with what is measured")
    parser.add_argument("--require-cuda", action="store_true", help="fail where there is no nvcc")
    options = parser.parse_args()
    if triton.knobs.runtime.interpret:
        parser.error("unset TRITON_INTERPRET: interpreted kernels can't be compiled")
    cuda = setup.find_cuda(setup.find_cxx())
    if cuda.left_out and (options.require_cuda or options.update):
        parser.error(f"CUDA can't be left out: {cuda.left_out}")

    sections, counted, problems = measure_all(cuda, may_reuse=not options.update)
    if options.update and not problems:
        limits.write(sections)
        traces.update(counted, traces.missed(counted, _beside_table(sections)))
    wanted = traces.read()
    for compiler, it in counted.items():
        problems += traces.regressions(it, wanted.of_compiler[compiler])
    missed = traces.missed(counted, _beside_table(sections))
    versions = {compiler: it.version for compiler, it in counted.items()}
    if versions == {compiler: it.version for compiler, it in wanted.of_compiler.items()}:
        listed = wanted.shortfalls
    else:
        print(f"gate: compiled by {versions}, the tables by others: only limits count")
        listed = [it for it in wanted.shortfalls if it in missed]
    known, unknown = traces.judge(missed, listed)
    problems += unknown
    if cuda.left_out:
        print(f"gate: CUDA was left out: {cuda.left_out}")
    for line in [*known, *problems]:
        print(line)
    compiled = ", ".join(f"{len(it.kernels)} by {compiler} {it.version}" for compiler, it in sections.items())
    launched = sum(len(rows) for it in counted.values() for rows in it.rows.values())
    print(f"gate: compiled {compiled}; ran a block of {launched}; problems: {len(problems)}")
    return bool(problems)


def _beside_table(sections: dict[str, Section]) -> list[str]:
    wanted = limits.read()
    return [line for compiler, section in sections.items() for line in limits.regressions(section, wanted[compiler])]


def measure_all(cuda: setup.Cuda, may_reuse: bool) -> tuple[dict[str, Section], dict[str, Traces], list[str]]:
    """What each compiler makes of its kernels, what a block of each case's launches does, and what went wrong. nvcc
    takes a minute, so what a build in this checkout has left may be reused."""
    launched, problems = launches.record()
    sections = {"triton": Section(triton.__version__, {})}
    with (
        tempfile.TemporaryDirectory() as cache,
        tempfile.TemporaryDirectory() as codes,
        ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn")) as pool,
    ):
        os.environ["TRITON_CACHE_DIR"] = cache  # empty, so that nothing stale passes
        keep = partial(traced.keep_code, Path(codes))
        begun = []
        if cuda.compile:
            begun += [_begin(pool, it) for it in _by_nvcc(cuda, may_reuse, keep)]
            version = setup.ask(shlex.split(cuda.compile)[0], "--version")[1]
            sections["nvcc"] = Section(re.findall(r"V([\d.]+)", version)[0], {})
        begun += [_begin(pool, _by_triton(it, keep)) for it in launched]
        more = dict.fromkeys(traced.triton_launches())  # takes a while, in which those are compiled
        begun += [_begin(pool, _by_triton(it, keep)) for it in more if it not in launched]
        if cuda.compile:
            targets.emulation_library()  # which tells of launches: built here, lest each process build one
        for job, measured in _results(begun, problems):
            kernels: Kernels = sections[job.compiler].kernels
            problems += [f"{' on '.join(it)}: two launches look alike" for it in kernels.keys() & measured.keys()]
            kernels.update(measured)
        counted = {compiler: Traces(section.version, {}) for compiler, section in sections.items()}
        cases = [(compiler, case, code) for case, it in CASES.items() for compiler in it.compilers for code in CODES]
        jobs = [Job(it[0], " ".join(it), traced.trace, (*it, Path(codes))) for it in cases if it[0] in sections]
        for job, rows in _results([_begin(pool, it) for it in jobs], problems):
            counted[job.compiler].rows[job.arguments[1:3]] = rows
    return sections, counted, problems


def _by_triton(launch: launches.Launch, keep: measure.Keep) -> Job:
    return Job("triton", f"{launch.name} on {launch.chip}", measure.triton, (launch, keep))


def _by_nvcc(cuda: setup.Cuda, may_reuse: bool, keep: measure.Keep) -> list[Job]:
    sources = sorted(Path("csrc").rglob("*_cuda.cu"))
    return [Job("nvcc", str(it), measure.cuda, (cuda.compile, it, may_reuse, keep)) for it in sources]


def _begin(pool: ProcessPoolExecutor, job: Job) -> Begun:
    return job, pool.submit(job.measure, *job.arguments)


def _results(begun: list[Begun], problems: list[str]) -> Iterator[tuple[Job, Any]]:
    for job, result in begun:
        try:
            yield job, result.result()
        except Exception as error:  # whatever a compiler throws
            problems.append(f"{job.name}: {error!r}")


if __name__ == "__main__":
    sys.exit(main())
