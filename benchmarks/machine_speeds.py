"""Measures how fast a machine copies and multiplies. Other speeds are compared with these."""

import functools
from collections.abc import Callable

import torch

from mpkernels.bench.pairs import STOPWATCHES, Stopwatch, wall_stopwatch

COPIED = 2**27  # bytes, so that source and target are several times the last cache


def copy_speed(device: str) -> float:
    """Return the bytes a second of the best of a few copies. Kernels that memory limits are compared with it.

    A kernel can be faster if its data stays in the cache. On a CPU it can also be faster if it writes only where it
    has read: a copy's target is first read into the cache, which isn't counted.
    """
    timed = _copy_stopwatch(device)
    return 2 * COPIED / min(timed() for _ in range(5))


@functools.cache
def _copy_stopwatch(device: str) -> Stopwatch:
    source = torch.ones(COPIED // 4, device=device)
    target = torch.zeros_like(source)
    return _stopwatch(device, lambda: target.copy_(source))


def gemm_speed(device: str, dtype: torch.dtype) -> float:
    """Return the flops a second of the best of a few products of random matrices in this dtype. A CPU may lack
    instructions for 16 bits, so there fp32 counts if it is faster."""
    dtypes = {dtype} if device == "cuda" else {dtype, torch.float32}
    return max(_gemm_speed(device, candidate) for candidate in dtypes)


def _gemm_speed(device: str, dtype: torch.dtype) -> float:
    size = 8192 if device == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    timed = _stopwatch(device, lambda: torch.mm(a, b, out=out))
    return 2 * size**3 / min(timed() for _ in range(5))


def _stopwatch(device: str, run: Callable[[], object]) -> Stopwatch:
    return (STOPWATCHES["device"] if device == "cuda" else wall_stopwatch)(run)
