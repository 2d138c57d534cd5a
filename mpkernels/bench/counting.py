"""What a whole step costs besides time, as torch's profilers see it: memory at its peak; on CUDA launches and waits."""

import gc
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch

from mpkernels.bench.pairs import Make

Counts = dict[str, int]

# The older of torch's profilers: the newer one writes to stderr here and there.
_legacy: Any = torch.autograd

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def count(make: Make, device: str) -> Counts:
    """Of one side alone, from before it is built: weights and states are in its peak. What a C++ library keeps for
    itself (oneDNN's and cuBLAS's workspaces) is not."""
    gc.collect()
    return _count_on_cuda(make) if device == "cuda" else _count_on_cpu(make)


def _count_on_cpu(make: Make) -> Counts:
    def build() -> None:
        run = make()
        for _ in range(2):  # the first makes the states
            run()

    changes = [record.cpu_memory_usage() for record in _records(build) if record.kind() == "memory_alloc"]
    return {"peak memory": max(accumulate(changes), default=0)}


def _records(run: Callable[[], object]) -> list[Any]:
    nothing_more = False, True, False, False, False, torch._C._profiler._ExperimentalConfig()  # but memory
    _legacy._enable_profiler_legacy(_legacy.ProfilerConfig(_legacy.ProfilerState.CPU, *nothing_more))
    try:
        run()
    finally:
        threads = _legacy._disable_profiler_legacy()
    return [record for thread in threads for record in thread]


def _count_on_cuda(make: Make) -> Counts:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run = make()
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile() as profiled:
        run()
    names = [event.name for event in profiled.events()]
    launches = sum("LaunchKernel" in name for name in names)
    return {"peak memory": peak, "host waits": sum(name in WAITS for name in names), "launches": launches}
