"""Fused mixed-precision training kernels for PyTorch, with torch's own names."""

from mpkernels import _extension, ops, selector
from mpkernels._batch_size import find_max_batch_size
from mpkernels._memory_comparison import compare_memory
from mpkernels._memory_report import memory_report
from mpkernels._profile import profile
from mpkernels.ops._registry import attach_defaults, backend, backends

__all__ = [
    "backend",
    "backends",
    "compare_memory",
    "find_max_batch_size",
    "memory_report",
    "ops",
    "profile",
    "selector",
]
__version__ = "0.1.0"

_extension.load()
attach_defaults()
