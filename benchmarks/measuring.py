"""Measures a case, counts what it costs besides time, and measures the machine's own speeds right after."""

import torch
from torch import nn

from benchmarks import machine_speeds
from benchmarks.counting import count
from benchmarks.raw_samples import Session
from mpkernels.bench import measuring, networks, training
from mpkernels.bench.cases import Benchmark
from mpkernels.bench.pairs import BUILDS
from mpkernels.bench.results import Result
from mpkernels.bench.settings import DTYPES, Setting


def run_one(benchmark: Benchmark, session: Session, seconds: float, builds: int = BUILDS) -> Result:
    place, device, dtype = benchmark.setting.place, benchmark.setting.place.device, benchmark.setting.dtype
    with measuring.threads(place):
        pair = benchmark.prepare()
        if benchmark.op == "train":
            pair = pair._replace(flops=flops_of_training(benchmark.setting))
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
    """Keep the highest speed so far, because other programs may have slowed down a measurement."""
    found[name] = max(speed, found.get(name, 0.0))


def flops_of_training(setting: Setting) -> int:
    """Return the linear layers' flops: two for each weight and row, and twice as many in the backward. Attention's own
    products are left out."""
    task = training.TASKS[setting.sizes.name]()
    with torch.device("meta"):
        network = task.network(networks.torchs_layer, "meta")
        inputs, _ = task.batch("meta")
    weights = sum(it.weight.numel() for it in network.modules() if isinstance(it, nn.Linear))
    if isinstance(network, networks.Transformer):
        weights += network.tokens.weight.numel()  # the output layer, whose weight is the embedding
        return 6 * weights * inputs.numel()
    return 6 * weights * inputs.shape[0]
