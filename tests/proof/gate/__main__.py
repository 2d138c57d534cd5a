import argparse
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import triton

import setup
from tests.proof.gate import launches, measure, table
from tests.proof.gate.table import Kernels, Section


class Job(NamedTuple):
    compiler: str
    name: str
    measure: Callable[..., Kernels]
    arguments: tuple[Any, ...]


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.proof.gate", description="Compile every kernel for every chip.")
    parser.add_argument("--update", action="store_true", help="rewrite the table with what is measured")
    parser.add_argument("--require-cuda", action="store_true", help="fail where there is no nvcc")
    options = parser.parse_args()
    if triton.knobs.runtime.interpret:
        parser.error("unset TRITON_INTERPRET: interpreted kernels can't be compiled")
    cuda = setup.find_cuda(setup.find_cxx())
    if cuda.left_out and (options.require_cuda or options.update):
        parser.error(f"CUDA can't be left out: {cuda.left_out}")

    sections, problems = measure_all(cuda, may_reuse=not options.update)
    if options.update and not problems:
        table.write(sections)
    wanted = table.read()
    for compiler, section in sections.items():
        if section.version != wanted[compiler].version:
            print(f"gate: {compiler} is {section.version}, the table's {wanted[compiler].version}: only limits count")
        problems += table.regressions(section, wanted[compiler])
    if cuda.left_out:
        print(f"gate: CUDA was left out: {cuda.left_out}")
    for problem in problems:
        print(problem)
    compiled = ", ".join(f"{len(it.kernels)} by {compiler} {it.version}" for compiler, it in sections.items())
    print(f"gate: compiled {compiled}; problems: {len(problems)}")
    return bool(problems)


def measure_all(cuda: setup.Cuda, may_reuse: bool) -> tuple[dict[str, Section], list[str]]:
    """What each compiler makes of its kernels, and what went wrong. nvcc takes a minute, so what a build in this
    checkout has left may be reused."""
    launched, problems = launches.record()
    jobs = [Job("triton", f"{it.name} on {it.chip}", measure.triton, (it,)) for it in launched]
    sections = {"triton": Section(triton.__version__, {})}
    if cuda.compile:
        sources = sorted(Path("csrc").rglob("*_cuda.cu"))
        jobs += [Job("nvcc", str(source), measure.cuda, (cuda.compile, source, may_reuse)) for source in sources]
        version = setup.ask(shlex.split(cuda.compile)[0], "--version")[1]
        sections["nvcc"] = Section(re.findall(r"V([\d.]+)", version)[0], {})
    with (
        tempfile.TemporaryDirectory() as cache,
        ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn")) as pool,
    ):
        os.environ["TRITON_CACHE_DIR"] = cache  # empty, so that nothing stale passes
        for job, result in [(job, pool.submit(job.measure, *job.arguments)) for job in jobs]:
            kernels = sections[job.compiler].kernels
            try:
                measured = result.result()
            except Exception as error:  # whatever a compiler throws
                problems.append(f"{job.name}: {error}")
            else:
                problems += [f"{' on '.join(it)}: two launches look alike" for it in kernels.keys() & measured.keys()]
                kernels.update(measured)
    return sections, problems


if __name__ == "__main__":
    sys.exit(main())
