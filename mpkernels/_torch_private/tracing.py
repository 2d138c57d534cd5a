"""What torch.compile, torch.export and torch.jit trace, and what they have compiled."""

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

# A stand-in that torch.compile and torch.export trace with. Without it: torch computes what they trace.
FakeTensor: type = look_up("torch._subclasses.fake_tensor", "FakeTensor", NoClass)


def before_compile(module: torch.nn.Module) -> torch.nn.Module | None:
    """Return what torch.compile wrapped here. Without the attribute: nothing, and tune runs the compiled module."""
    return getattr(module, "_orig_mod", None)


def is_exporting() -> bool:
    """Return whether torch.export traces. Without the flag: what is_exporting() says, which is true of all that an
    older torch compiles."""
    flag = getattr(torch.compiler, "_is_exporting_flag", None)
    return torch.compiler.is_exporting() if flag is None else bool(flag)


def constant_in_graphs(function: Function) -> Function:
    """Have torch.compile call this while it traces, as torch.compiler.assume_constant_result does, which first imports
    what compiles: a second, also where nothing does. Without the mark: it is traced, as any function."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def uncompiled() -> Any:
    """Have what torch.compile has compiled run as it was written. Where nothing has imported it, nothing is."""
    is_there = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if is_there else nullcontext()


def may_be_compiled() -> bool:
    """Return whether something has imported torch.compile, which takes a second."""
    return torch.compiler.is_compiling() or "torch._dynamo" in sys.modules


def as_written(
    name: str,
    function: Function,
    why: str = "of DTensors must not be part of a full graph: torch.compile can't trace their meshes",
) -> Function:
    """Return a function that torch.compile runs as it is, with all that it calls, or refuses with fullgraph=True."""
    if torch.compiler.is_compiling():
        raise RuntimeError(f"{name} {why}")
    written: Function = torch.compiler.disable(function)
    return written


_TRACING = [getattr(_kinds_of_modes, name, None) for name in ("FAKE", "PROXY", "FUNCTIONAL")]


def is_tracing() -> bool:
    """Return whether torch writes down what is called: then a tensor is a stand-in, or would be a graph's constant."""
    return (
        torch.compiler.is_compiling()
        or are_transforms_active()
        or (count_dispatch_modes() > 0 and any(kind is None or _mode_of(kind) is not None for kind in _TRACING))
    )
