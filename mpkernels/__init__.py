"""Fused mixed-precision training kernels for PyTorch, with torch's own names."""

from mpkernels import _extension, ops, selector
from mpkernels._batch_size import find_max_batch_size
from mpkernels.ops._registry import attach_defaults, backend, backends

__all__ = ["backend", "backends", "find_max_batch_size", "ops", "selector"]
__version__ = "0.1.0"

_extension.load()
attach_defaults()
