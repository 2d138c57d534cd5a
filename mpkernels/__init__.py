"""Fused mixed-precision training kernels for PyTorch, with torch's own names."""

import importlib
from typing import TYPE_CHECKING, Any

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

_LAZY = ("amp", "doctor", "functional", "nn", "optim")

if TYPE_CHECKING:
    from mpkernels import amp as amp
    from mpkernels import doctor as doctor
    from mpkernels import functional as functional
    from mpkernels import nn as nn
    from mpkernels import optim as optim
else:

    def __getattr__(name: str) -> Any:
        """Submodules are imported when they are first asked for."""
        if name in _LAZY:
            return importlib.import_module(f"mpkernels.{name}")
        raise AttributeError(f"module 'mpkernels' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
