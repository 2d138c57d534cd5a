"""From a case to its result."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mpkernels.bench import machine
from mpkernels.bench.cases import Benchmark
from mpkernels.bench.counting import count
from mpkernels.bench.pairs import BUILDS, measure
from mpkernels.bench.results import Result, Run, microseconds
from mpkernels.bench.settings import DTYPES, Place


def run_one(benchmark: Benchmark, run: Run, seconds: float, builds: int = BUILDS) -> Result:
    """Measures a case and adds it to ``run`` and to what that has of it, with the machine's own speeds right after."""
    earlier = next((result for result in run.results if result.name == benchmark.name), None)
    place, device = benchmark.setting.place, benchmark.setting.place.device
    with _threads(place):
        pair = benchmark.prepare()
        samples = measure(pair, device, seconds, builds)
        counts = {}
        if pair.is_counted and not earlier:  # a second count would be the same
            counts = {"ours": count(pair.ours, device), "theirs": count(pair.theirs, device)}
        _keep_best(run.copy_speeds, str(place), machine.copy_speed(device))
        if pair.flops:
            dtype = benchmark.setting.dtype
            _keep_best(run.gemm_speeds, f"{place} {dtype}", machine.gemm_speed(device, DTYPES[dtype]))
    result = Result(
        benchmark.op,
        benchmark.variant,
        str(place),
        benchmark.setting.dtype,
        benchmark.setting.case.name,
        benchmark.kernel,
        pair.moved,
        round(samples.waited, 3),
        microseconds(samples.ours),
        microseconds(samples.theirs),
        benchmark.baseline,
        pair.flops,
        counts,
    )
    if earlier:
        result = earlier.and_more(result)
        run.results[run.results.index(earlier)] = result
    else:
        run.results.append(result)
    del pair
    gc.collect()  # networks hold on to themselves
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # or, after eight networks of one kind, torch would silently compile no more
    return result


def _keep_best(speeds: dict[str, float], of: str, speed: float) -> None:
    """Other programs may have been at work beside any one measurement."""
    speeds[of] = max(speed, speeds.get(of, 0.0))


@contextmanager
def _threads(place: Place) -> Iterator[None]:
    before = torch.get_num_threads()
    if place.device == "cpu":
        torch.set_num_threads(place.threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
