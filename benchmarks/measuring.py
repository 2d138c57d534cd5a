"""A case's result, with what it counts, and with the machine's own speeds right after."""

from benchmarks import machine_speeds
from benchmarks.counting import count
from benchmarks.raw_samples import Session
from mpkernels.bench import measuring
from mpkernels.bench.cases import Benchmark
from mpkernels.bench.pairs import BUILDS
from mpkernels.bench.results import Result
from mpkernels.bench.settings import DTYPES


def run_one(benchmark: Benchmark, session: Session, seconds: float, builds: int = BUILDS) -> Result:
    place, device, dtype = benchmark.setting.place, benchmark.setting.place.device, benchmark.setting.dtype
    with measuring.threads(place):
        pair = benchmark.prepare()
        result = measuring.result_of(benchmark, pair, seconds, builds)
        if pair.is_counted:
            result.counts.update(ours=count(pair.ours, device), theirs=count(pair.theirs, device))
        _keep_best(session.copy_speeds, str(place), machine_speeds.copy_speed(device))
        if pair.flops:
            _keep_best(session.gemm_speeds, f"{place} {dtype}", machine_speeds.gemm_speed(device, DTYPES[dtype]))
    del pair
    measuring.clean_up()
    return session.add(result)


def _keep_best(found: dict[str, float], name: str, speed: float) -> None:
    """Other programs may have been at work beside any one measurement."""
    found[name] = max(speed, found.get(name, 0.0))
