"""Fused mixed-precision training kernels for PyTorch, with torch's own names."""

import sys
from importlib import import_module
from typing import Any

from mpkernels import amp, checkpoint, functional, nn, ops, optim, selector
from mpkernels.memory.batch_size import find_max_batch_size
from mpkernels.memory.report import compare_memory, memory_report
from mpkernels.metrics import Metrics
from mpkernels.ops import _extension
from mpkernels.ops._registry import backends
from mpkernels.ops._routes import attach_defaults, backend
from mpkernels.profiling import profile
from mpkernels.selector.tune import tune

__all__ = [
    "Metrics",
    "amp",
    "backend",
    "backends",
    "checkpoint",
    "compare_memory",
    "find_max_batch_size",
    "functional",
    "memory_report",
    "nn",
    "ops",
    "optim",
    "profile",
    "selector",
    "tune",
]
__version__ = "0.1.0"

_extension.load()
attach_defaults()


def __getattr__(name: str) -> Any:
    """Import ``mpkernels.doctor``, which uses all of the package, on first use. Find names of the rooms, too:
    ``mpkernels.AdamW`` is ``mpkernels.optim.AdamW``."""
    if name == "doctor":
        return import_module("mpkernels.doctor")
    for room in (optim, amp, nn, functional):
        if name in room.__all__:
            return getattr(room, name)
    raise AttributeError(f"module 'mpkernels' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
