"""Who else sees what is called here: torch's dispatch modes, transforms and hooks."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

_TRACING = tuple(getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "PROXY", "FUNCTIONAL"))


def is_tracing() -> bool:
    """Whether torch writes down what is called: then a tensor is a stand-in, or would be a constant of the graph."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or (
            torch._C._len_torch_dispatch_stack() > 0
            and any(torch._C._get_dispatch_mode(mode) is not None for mode in _TRACING)
        )
    )


@contextmanager
def unseen() -> Iterator[None]:
    """Neither dispatch modes nor a checkpoint, which counts what is saved, notice what is done within."""
    autograd: Any = torch._C._autograd
    hooks = saved_tensors_hooks(_same, _same) if autograd._saved_tensors_hooks_is_enabled() else nullcontext()
    with torch._C._DisableTorchDispatch(), hooks:
        yield


def _same(tensor: Tensor) -> Tensor:
    return tensor
