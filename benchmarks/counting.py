"""Counts by torch's profilers and hooks what a run costs besides time: peak memory, bytes saved for the backward, and
on CUDA launches and waits."""

import gc
from itertools import accumulate
from typing import Any

import torch

from mpkernels._shared.saved_for_backward import saved_storages
from mpkernels.bench.pairs import Make, Workload
from mpkernels.bench.results import Counts

# The older of torch's profilers: the newer one writes to stderr here and there.
_legacy: Any = torch.autograd

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def count(make: Make, device: str) -> Counts:
    """Count one side alone. Its peak includes the weights, grads and states that it keeps after a run. Workspaces of
    oneDNN and cuBLAS are left out, and so is the first run, which makes the states and compiles."""
    gc.collect()
    return _count_on_cuda(make) if device == "cuda" else _count_on_cpu(make)


def saved_bytes(run: Workload) -> int:
    """Return how many bytes a run saves for its backward, each storage once. Parameters and inputs, which outlive the
    run, don't count."""
    with saved_storages() as saved:
        run()
    gc.collect()
    return sum(size for storage, size in saved.items() if storage.expired())


def peak_beside(run: Workload, device: str = "cpu") -> int:
    """Return a run's peak memory on the device in bytes, without what was allocated before."""
    if device == "cpu":
        return max(accumulate(_allocations(run)), default=0)
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() - before


def _count_on_cpu(make: Make) -> Counts:
    runs: list[Workload] = []

    def first() -> None:
        runs.append(make())
        runs[0]()
        gc.collect()

    held = sum(_allocations(first))
    return {"kept": held, "peak memory": held + peak_beside(runs[0]), **_saved(runs[0])}


def _saved(run: Workload) -> Counts:
    size = saved_bytes(run)
    return {"saved": size} if size else {}  # an optimizer's step has no backward


def _allocations(run: Workload) -> list[int]:
    """Return the bytes of each allocation, in order. Freed bytes count below 0."""
    return [record.cpu_memory_usage() for record in _records(run) if record.kind() == "memory_alloc"]


def _records(run: Workload) -> list[Any]:
    memory_alone = False, True, False, False, False, torch._C._profiler._ExperimentalConfig()
    _legacy._enable_profiler_legacy(_legacy.ProfilerConfig(_legacy.ProfilerState.CPU, *memory_alone))
    try:
        run()
    finally:
        threads = _legacy._disable_profiler_legacy()
    return [record for thread in threads for record in thread]


def _count_on_cuda(make: Make) -> Counts:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    run = make()
    run()
    kept = torch.cuda.memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile() as profiled:
        run()
    names = [event.name for event in profiled.events()]
    launches = sum("LaunchKernel" in name for name in names)
    waits = sum(name in WAITS for name in names)
    return {"kept": kept, "peak memory": peak, "host waits": waits, "launches": launches, **_saved(run)}
