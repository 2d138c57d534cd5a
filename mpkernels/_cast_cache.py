"""What autocast makes of an fp32 parameter is kept until the parameter changes: one cast a step, not one a forward.

A change is noticed by the parameter's version, by its memory, and by the end of any ``torch.optim.Optimizer``'s step,
also of one that writes to ``parameter.data``, which raises no version. What is cast without grad is never kept: weights
that are swapped through ``.data`` for an evaluation, as averages are, are seen. One change goes unseen: a write through
``.data`` or into shared memory, outside of an optimizer, between two forwards with grad. ``clear()`` tells of it, and
``torch.autocast(..., cache_enabled=False)`` keeps nothing.
"""

from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

_TRACING = tuple(getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "PROXY", "FUNCTIONAL"))


class _Kept(NamedTuple):
    version: int
    data_ptr: int
    cast: Tensor


_kept = WeakTensorKeyDictionary()
_lock = Lock()
_watches_optimizers = False


def is_usable() -> bool:
    """Not where torch traces: a cast would be a stand-in, or a constant of the graph."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or any(torch._C._get_dispatch_mode(mode) is not None for mode in _TRACING)
    )


def cast(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """``parameter.detach().to(dtype)``, which nobody may write to."""
    if not _may_keep(parameter):
        return parameter.detach().to(dtype)
    with _lock:
        kept = _kept.get(parameter)
        version, data_ptr = parameter._version, parameter.data_ptr()
        if kept is None or (kept.version, kept.data_ptr, kept.cast.dtype) != (version, data_ptr, dtype):
            kept = _Kept(version, data_ptr, parameter.detach().to(dtype))
            _watch_optimizers()
            _kept[parameter] = kept
        return kept.cast  # type: ignore[no-any-return]


def clear() -> None:
    """Forgets every cast."""
    with _lock:
        _kept.clear()


def _may_keep(parameter: Tensor) -> bool:
    """As torch's own cache has it; and never in a CUDA graph, whose replays would not see the weight change."""
    return (
        parameter.requires_grad
        and parameter.is_leaf
        and torch.is_grad_enabled()
        and torch.is_autocast_cache_enabled()
        and not (parameter.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def _watch_optimizers() -> None:
    global _watches_optimizers
    if not _watches_optimizers:
        register_optimizer_step_post_hook(_forget_after_step)
        _watches_optimizers = True


def _forget_after_step(*_: Any) -> None:
    if not torch.compiler.is_compiling():  # a compiled step raises versions
        clear()
