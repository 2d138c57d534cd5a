"""Tells what a tensor is a view of, where it lies, whether it has changed, and how it is differentiated."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from mpkernels._torch_private.finding import look_up

# Returns a sparse grad's values, even if an index occurs twice. Without it: torch demands a coalesced grad.
values_of: Callable[[Tensor], Tensor] = look_up("torch", "Tensor._values", Tensor.values)
leaves_of: Callable[[Any], list[Any]] = look_up("torch.utils._pytree", "tree_leaves", lambda tree: [tree])
map_leaves: Callable[..., Any] = look_up("torch.utils._pytree", "tree_map", lambda function, tree: function(tree))

# Runs the backward of an autograd.Function. Without it: no backward seems to run inside another.
_function_backward: Any = look_up("torch.autograd.function", "BackwardCFunction.apply", None)


def is_backward_nested() -> bool:
    """Return whether the running backward was started inside another one, by the backward of an autograd.Function, as
    reentrant checkpoints do."""
    code, frame = getattr(_function_backward, "__code__", None), sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def version_of(tensor: Tensor) -> object:
    """Return a value that changes when the tensor is changed in place. Without torch's counter: a new value each time,
    so that nothing is kept for a tensor that might have changed."""
    version = getattr(tensor, "_version", None)
    return object() if version is None else version


def sum_of_versions(tensors: Sequence[Tensor | None]) -> object:
    """Return a number that changes when one of the tensors is changed in place. Inference tensors have no counter, so
    their changes go unnoticed. Without torch's counter: a new object each time, as ``version_of`` returns."""
    try:
        return sum([it._version for it in tensors if it is not None])
    except RuntimeError:  # one is an inference tensor
        return sum([it._version for it in tensors if it is not None and not it.is_inference()])
    except AttributeError:
        return object()


def base_of(tensor: Tensor) -> Tensor | None:
    """Return what tensor this is a view of. Without the attribute: None, and each call casts a transposed weight."""
    return getattr(tensor, "_base", None)


def storage_of(tensor: Tensor) -> int:
    """Return a number that tensors in the same storage share. Without the storage's address: the memory's, but tensors
    on the meta device have no memory."""
    storage = tensor.untyped_storage()
    return int(getattr(storage, "_cdata", None) or storage.data_ptr())
