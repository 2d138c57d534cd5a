"""What the numbers were measured on, without naming the host."""

import functools
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import torch

import mpkernels
from mpkernels._shared import cpu
from mpkernels.bench.pairs import STOPWATCHES, Stopwatch, wall_stopwatch

COPIED = 2**27  # bytes, so that source and target are several times the last cache
HARDWARE = ("cpu", "simd", "cores", "gpu")  # what must be equal for two results to be compared

Description = dict[str, str | int | None]


@functools.cache
def describe() -> Description:
    gpu = torch.cuda.is_available()
    return {
        "cpu": cpu.name(),
        "simd": cpu.simd(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if gpu else None,
        "driver": _driver() if gpu else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "mpkernels": mpkernels.__version__,
        "commit": _commit(),
    }


def _driver() -> str | None:
    return _first_word("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def _commit() -> str | None:
    """Of the checkout that the package lies in; None where it is installed, or there is no git."""
    root = Path(mpkernels.__file__).parents[1]
    return (
        _first_word("git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*")
        if (root / ".git").exists()
        else None
    )


def _first_word(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    words = subprocess.run(command, capture_output=True, text=True).stdout.split()
    return words[0] if words else None


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
    return _stopwatch(device, lambda: target.copy_(source))


def gemm_speed(device: str, dtype: torch.dtype) -> float:
    """Flops in a second by the best of a few products of random matrices of this dtype; on a CPU of this or of fp32,
    for it may lack the instructions of the 16-bit ones."""
    dtypes = {dtype} if device == "cuda" else {dtype, torch.float32}
    return max(_gemm_speed(device, each) for each in dtypes)


def _gemm_speed(device: str, dtype: torch.dtype) -> float:
    size = 8192 if device == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    timed = _stopwatch(device, lambda: torch.mm(a, b, out=out))
    return 2 * size**3 / min(timed() for _ in range(5))


def _stopwatch(device: str, run: Callable[[], object]) -> Stopwatch:
    return (STOPWATCHES["device"] if device == "cuda" else wall_stopwatch)(run)
