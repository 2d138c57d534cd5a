"""Fused mixed-precision training kernels for PyTorch, with torch's own names."""

from mpkernels import _extension, ops, selector
from mpkernels._profile import profile
from mpkernels.ops._registry import attach_defaults, backend, backends

__all__ = ["backend", "backends", "ops", "profile", "selector"]
__version__ = "0.1.0"

_extension.load()
attach_defaults()
