"""Measures a case, and returns its result."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mpkernels.bench.cases import Benchmark
from mpkernels.bench.pairs import Pair, measure
from mpkernels.bench.results import Result, microseconds
from mpkernels.bench.settings import Place


def run_one(benchmark: Benchmark, seconds: float, builds: int) -> Result:
    with threads(benchmark.setting.place):
        result = result_of(benchmark, benchmark.prepare(), seconds, builds)
    clean_up()
    return result


def result_of(benchmark: Benchmark, pair: Pair, seconds: float, builds: int) -> Result:
    samples = measure(pair, benchmark.setting.place.device, seconds, builds)
    return Result(
        benchmark.op,
        benchmark.variant,
        str(benchmark.setting.place),
        benchmark.setting.dtype,
        benchmark.setting.sizes.name,
        benchmark.kernel,
        pair.moved,
        round(samples.waited, 3),
        microseconds(samples.ours),
        microseconds(samples.theirs),
        benchmark.baseline,
        pair.flops,
    )


def clean_up() -> None:
    gc.collect()  # frees networks, which refer to themselves
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # after eight networks of one kind torch would silently compile no more


@contextmanager
def threads(place: Place) -> Iterator[None]:
    before = torch.get_num_threads()
    if place.device == "cpu":
        torch.set_num_threads(place.threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
