"""Runs the compile gate: measures the kernels, compares with the table, or rewrites it with ``--update``."""

import argparse
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import triton

import toolchain
from tests.proof.gate import launches, limits, loops, measure
from tests.proof.gate.limits import Kernels, Section


class Job(NamedTuple):
    compiler: str
    name: str
    measure: Callable[..., Any]
    arguments: tuple[Any, ...]


Begun = tuple[Job, Future[Any]]

# Triton's kernels take most of the gate's time. Of these chips one is the oldest, the other has run the kernels.
CHIPS = "sm_75", "sm_90"
_launched: list[launches.Launch] = []  # processes inherit it, because a launch can't be pickled


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m tests.proof.gate", description="Compile the kernels, and look at the code."
    )
    parser.add_argument("--all", action="store_true", help=f"Triton's for every chip, not only {' and '.join(CHIPS)}")
    parser.add_argument("--update", action="store_true", help="rewrite the table with what is measured")
    parser.add_argument("--require-cuda", action="store_true", help="fail where there is no nvcc")
    options = parser.parse_args()
    if triton.knobs.runtime.interpret:
        parser.error("unset TRITON_INTERPRET: interpreted kernels can't be compiled")
    cuda = toolchain.find_cuda(toolchain.find_cxx())
    if cuda.left_out and (options.require_cuda or options.update):
        parser.error(f"CUDA can't be left out: {cuda.left_out}")

    chips = tuple(launches.TARGETS) if options.all or options.update else CHIPS
    sections, problems = measure_all(cuda, chips, may_reuse=not options.update)
    if options.update and not problems:
        limits.write(sections)
    wanted = limits.read()
    wanted["triton"] = limits.of_chips(wanted["triton"], chips)
    for compiler, section in sections.items():
        if section.version != wanted[compiler].version:
            print(f"gate: compiled by {compiler} {section.version}, the table by another: only limits count")
        problems += limits.regressions(section, wanted[compiler])
    if cuda.left_out:
        print(f"gate: CUDA was left out: {cuda.left_out}")
    for line in problems:
        print(line)
    compiled = ", ".join(f"{compiler} {it.version}: {len(it.kernels)}" for compiler, it in sections.items())
    print(f"gate: {compiled}; problems: {len(problems)}")
    return bool(problems)


def measure_all(cuda: toolchain.Cuda, chips: Sequence[str], may_reuse: bool) -> tuple[dict[str, Section], list[str]]:
    """Return what each compiler makes of its kernels, and what went wrong. nvcc takes minutes, so objects that a build
    in this checkout has left may be reused."""
    _launched[:], problems = launches.record()
    sections = {"triton": Section(triton.__version__, {})}
    with (
        tempfile.TemporaryDirectory() as cache,
        ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("fork")) as pool,
    ):
        os.environ["TRITON_CACHE_DIR"] = cache  # empty, so that nothing stale passes
        begun = []
        if cuda.compile:
            begun += [_begin(pool, it) for it in _nvcc_jobs(cuda, may_reuse)]
            (version,) = re.findall(r"V([\d.]+)", toolchain.ask(shlex.split(cuda.compile)[0], "--version")[1])
            sections |= {"nvcc": Section(version, {}), "loops": Section(version, {})}
        begun += [_begin(pool, _triton_job(i)) for i, it in enumerate(_launched) if it.chip in chips]
        for job, result in begun:
            try:
                measured = result.result()
            except Exception as error:  # whatever a compiler throws
                problems.append(f"{job.name}: {error!r}")
                continue
            kernels: Kernels = sections[job.compiler].kernels
            problems += [f"{' on '.join(it)}: two launches look alike" for it in kernels.keys() & measured.keys()]
            kernels.update(measured)
    return sections, problems


def _triton_job(number: int) -> Job:
    launch = _launched[number]
    return Job("triton", f"{launch.name} on {launch.chip}", _measure_launch, (number,))


def _measure_launch(number: int) -> Kernels:
    return measure.triton(_launched[number])


def _nvcc_jobs(cuda: toolchain.Cuda, may_reuse: bool) -> list[Job]:
    sources = sorted(Path("csrc").rglob("*_cuda.cu"))
    whole = [Job("nvcc", str(it), measure.cuda, (cuda.compile, it, may_reuse)) for it in sources]
    return whole + [Job("loops", it, loops.count, (cuda.compile, it)) for it in loops.SOURCES]


def _begin(pool: ProcessPoolExecutor, job: Job) -> Begun:
    return job, pool.submit(job.measure, *job.arguments)


if __name__ == "__main__":
    sys.exit(main())
