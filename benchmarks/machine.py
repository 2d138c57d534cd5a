"""What the numbers were measured on, without naming the host."""

import functools
import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import torch

import mpkernels
from benchmarks.pairs import Stopwatch, gpu_stopwatch, wall_stopwatch

COPIED = 2**27  # bytes, so that source and target are several times the last cache


@functools.cache
def describe() -> dict[str, object]:
    gpu = torch.cuda.is_available()
    return {
        "cpu": _cpu(),
        "simd": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if gpu else None,
        "driver": _driver() if gpu else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "mpkernels": mpkernels.__version__,
    }


def _cpu() -> str:
    """Virtual machines cut the name short, "AMD EPYC" say, so family and model go with it."""
    about = Path("/proc/cpuinfo")
    if not about.exists():
        return platform.processor() or platform.machine()
    lines = about.read_text().partition("\n\n")[0].splitlines()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = facts.get("model name", platform.machine())
    return f"{name}, family {facts['cpu family']} model {facts['model']}" if "cpu family" in facts else name


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def copy_speed(device: str) -> float:
    """Bytes read and written in a second by the best of a few copies: the yardstick of memory-bound kernels.

    Not a bound: what stays in the cache is faster, and so is, on a CPU, what only reads or writes where it has read; a
    copy's target is first read into the cache, which nobody counts.
    """
    timed = _copy_stopwatch(device)
    return 2 * COPIED / min(timed() for _ in range(5))


@functools.cache
def _copy_stopwatch(device: str) -> Stopwatch:
    source = torch.ones(COPIED // 4, device=device)
    target = torch.zeros_like(source)
    stopwatch = gpu_stopwatch if device == "cuda" else wall_stopwatch
    return stopwatch(lambda: target.copy_(source))
