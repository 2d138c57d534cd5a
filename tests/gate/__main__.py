import argparse
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton

import setup
from tests.gate import launches, measure, table
from tests.gate.table import Kernels, Section

Job = tuple[Callable[..., Kernels], tuple[Any, ...]]


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.gate", description="Compile every kernel for every chip.")
    parser.add_argument("--update", action="store_true", help="rewrite the table with what is measured")
    parser.add_argument("--require-cuda", action="store_true", help="fail where there is no nvcc")
    options = parser.parse_args()
    if "TRITON_INTERPRET" in os.environ:
        parser.error("unset TRITON_INTERPRET: interpreted kernels can't be compiled")
    cuda = setup.find_cuda(setup.find_cxx())
    if cuda.left_out and (options.require_cuda or options.update):
        parser.error(f"no CUDA: {cuda.left_out}")

    sections, problems = measure_all(cuda)
    if options.update:
        table.write(sections)
    wanted = table.read()
    for compiler, section in sections.items():
        if section.version != wanted[compiler].version:
            print(f"gate: {compiler} is {section.version}, the table's {wanted[compiler].version}: limits only")
        problems += table.regressions(section, wanted[compiler])
    if cuda.left_out:
        print(f"gate: CUDA was left out: {cuda.left_out}")
    print(*problems, sep="\n", end="\n" * bool(problems))
    made_by = ", ".join(f"{len(it.kernels)} by {compiler} {it.version}" for compiler, it in sections.items())
    print(f"gate: {made_by}: {f'{len(problems)} problems' if problems else 'none is worse than the table'}")
    return bool(problems)


def measure_all(cuda: setup.Cuda) -> tuple[dict[str, Section], list[str]]:
    """What each compiler makes of its kernels, and what went wrong."""
    launched, problems = launches.record()
    jobs: dict[str, list[Job]] = {"triton": [(measure.triton, (launch,)) for launch in launched]}
    versions = {"triton": triton.__version__}
    if cuda.compile:
        command = f"{cuda.compile} {setup.COMMON_FLAGS}"
        jobs["nvcc"] = [(measure.cuda, (command, source)) for source in sorted(Path("csrc").glob("*_cuda.cu"))]
        versions["nvcc"] = re.findall(r"V([\d.]+)", setup.ask(shlex.split(cuda.compile)[0], "--version")[1])[-1]
    sections = {}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        for compiler in sorted(jobs):
            kernels, failures = run(jobs[compiler])
            sections[compiler] = Section(versions[compiler], kernels)
            problems += failures
    return sections, problems


def run(jobs: Iterable[Job]) -> tuple[Kernels, list[str]]:
    kernels: Kernels = {}
    problems = []
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn")) as pool:
        for (_, arguments), future in [(job, pool.submit(job[0], *job[1])) for job in jobs]:
            try:
                measured = future.result()
            except Exception as error:  # whatever a compiler throws
                problems.append(f"{arguments}: {error}")
                continue
            problems += [f"{kernel} on {chip}: two launches look alike" for kernel, chip in kernels & measured.keys()]
            kernels |= measured
    return kernels, problems


if __name__ == "__main__":
    sys.exit(main())
