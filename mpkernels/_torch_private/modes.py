"""Detects modes, transforms and autocast, which observe the ops that are called, and hides ops from them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks

from mpkernels._torch_private.finding import NoClass, look_up, maybe

# Tell whether a tracer, mode or transform observes ops. Without these: we assume so, and torch computes.
are_transforms_active: Callable[[], bool] = look_up("torch._C", "_are_functorch_transforms_active", maybe)
count_dispatch_modes: Callable[[], int] = look_up("torch._C", "_len_torch_dispatch_stack", maybe)
count_function_modes: Callable[[], int] = look_up("torch._C", "_len_torch_function_stack", maybe)
_function_mode_at: Callable[[int], Any] = look_up("torch._C", "_get_function_stack_at", lambda at: None)
_DeviceContext: type = look_up("torch.utils._device", "DeviceContext", NoClass)
# Hides calls from function modes and tensors of subclasses. Without it: modes and subclasses see what fuse looks at.
without_functions: Any = look_up("torch._C", "DisableTorchFunction", nullcontext)

# Faster than the public function, which matters in a small layer.
is_any_autocast_enabled: Callable[[], bool] = look_up("torch._C", "_is_any_autocast_enabled", maybe)

# Hide ops from dispatch modes and transforms. Without these: modes see the ops, too.
without_dispatch_modes: Any = look_up("torch._C", "_DisableTorchDispatch", nullcontext)
_without_transforms: Any = look_up("torch._C", "_DisableFuncTorch", nullcontext)
_may_hook_saved: Callable[[], bool] = look_up("torch._C", "_autograd._saved_tensors_hooks_is_enabled", maybe)

# A mode that sees each op. Without it: memory_report counts no casts of autocast's.
DispatchMode: Any = look_up("torch.utils._python_dispatch", "TorchDispatchMode", nullcontext)


def is_function_mode_active() -> bool:
    """Return whether a TorchFunctionMode sees calls of torch's functions. A default device's mode doesn't count: it
    only changes functions that make tensors. Without the stack's entries: each mode counts."""
    for at in range(count_function_modes()):  # noqa: SIM110, for torch.compile
        if type(_function_mode_at(at)) is not _DeviceContext:
            return True
    return False


def derives_forward() -> bool:
    """Return whether forward-mode derivatives are being computed. Without the level: True."""
    return bool(getattr(forward_ad, "_current_level", 0) >= 0)


def is_watched() -> bool:
    """Return whether a mode, a transform or a tracer observes the ops that torch calls."""
    return are_transforms_active() or count_dispatch_modes() > 0 or derives_forward() or is_function_mode_active()


@contextmanager
def unseen() -> Iterator[None]:
    """Hide everything inside this context from dispatch modes, and from activation checkpointing, which counts saved
    tensors."""
    hooks = saved_tensors_hooks(_same, _same) if _may_hook_saved() else nullcontext()
    with without_dispatch_modes(), hooks:
        yield


def _same(tensor: Tensor) -> Tensor:
    return tensor


@contextmanager
def for_real() -> Iterator[None]:
    """Hide everything inside this context from dispatch modes and transforms. Finalizers need it, because they may run
    at any time."""
    with without_dispatch_modes(), _without_transforms():
        yield
