"""Detects tracing by torch.compile, torch.export and torch.jit, and what they have compiled."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import torch

from mpkernels._torch_private.finding import NoClass, look_up, maybe
from mpkernels._torch_private.modes import are_transforms_active, count_dispatch_modes

Function = TypeVar("Function", bound=Callable[..., Any])
_mode_of: Callable[[Any], Any] = look_up("torch._C", "_get_dispatch_mode", lambda kind: kind)
_kinds_of_modes: Any = look_up("torch._C", "_TorchDispatchModeKey", None)
is_jit_tracing: Callable[[], bool] = look_up("torch._C", "_is_tracing", maybe)

# The class of tensors that torch.compile and torch.export trace with. Without it: torch computes in traced code.
FakeTensor: type = look_up("torch._subclasses.fake_tensor", "FakeTensor", NoClass)


def before_compile(module: torch.nn.Module) -> torch.nn.Module | None:
    """Return the module that torch.compile wrapped. Without the attribute: None, and tune runs the compiled module."""
    return getattr(module, "_orig_mod", None)


def is_exporting() -> bool:
    """Return whether torch.export traces. Without the flag: what torch's is_exporting() says, which an older torch also
    sets in torch.compile."""
    flag = getattr(torch.compiler, "_is_exporting_flag", None)
    return torch.compiler.is_exporting() if flag is None else bool(flag)


def constant_in_graphs(function: Function) -> Function:
    """Let torch.compile call this function while it traces, and take the result for a constant. Unlike
    torch.compiler.assume_constant_result this doesn't import the compiler, which takes a second. Without the mark: the
    function is traced like any other."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def uncompiled() -> Any:
    """Return a context in which compiled code runs as it was written. Without torch.compile imported there is none."""
    is_imported = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if is_imported else nullcontext()


def may_be_compiled() -> bool:
    """Return whether the caller may be compiled. Checks whether torch.compile is imported, without importing it."""
    return torch.compiler.is_compiling() or "torch._dynamo" in sys.modules


def as_written(
    name: str,
    function: Function,
    why: str = "of DTensors must not be part of a full graph: torch.compile can't trace their meshes",
) -> Function:
    """Return the function, marked so that torch.compile doesn't compile it and all that it calls, and raises with
    fullgraph=True."""
    if torch.compiler.is_compiling():
        raise RuntimeError(f"{name} {why}")
    written: Function = torch.compiler.disable(function)
    return written


def is_known_to_host(tensor: torch.Tensor) -> bool:
    """Return whether the host can read the tensor without waiting for a device. False under a mode or tracer: the ops
    that it records must not depend on values."""
    is_plain = type(tensor) is torch.Tensor and tensor.device.type == "cpu"
    return is_plain and not (is_tracing() or count_dispatch_modes() > 0)


_TRACING = [getattr(_kinds_of_modes, name, None) for name in ("FAKE", "PROXY", "FUNCTIONAL")]


def is_tracing() -> bool:
    """Return whether torch records calls into a graph: then a tensor has no values, or would become a constant."""
    return (
        torch.compiler.is_compiling()
        or are_transforms_active()
        or (count_dispatch_modes() > 0 and any(kind is None or _mode_of(kind) is not None for kind in _TRACING))
    )
