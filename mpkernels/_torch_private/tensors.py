"""What a tensor is a view of, where it lies, whether it has changed, and how it is derived."""

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd import forward_ad

from mpkernels._torch_private.finding import look_up

# Returns a sparse grad's values, also if an index comes twice. Without it: torch asks for a coalesced grad.
values_of: Callable[[Tensor], Tensor] = look_up("torch", "Tensor._values", Tensor.values)
leaves_of: Callable[[Any], list[Any]] = look_up("torch.utils._pytree", "tree_leaves", lambda tree: [tree])
map_leaves: Callable[..., Any] = look_up("torch.utils._pytree", "tree_map", lambda function, tree: function(tree))

# Runs the backward of a Python function. Without it: no backward seems to run inside another.
_function_backward: Any = look_up("torch.autograd.function", "BackwardCFunction.apply", None)


def is_backward_nested() -> bool:
    """Return whether the backward that calls this was started inside another one, by a function's own backward, as
    reentrant checkpoints do."""
    code, frame = getattr(_function_backward, "__code__", None), sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def version_of(tensor: Tensor) -> object:
    """Return what differs once a tensor has been changed in place. Without torch's counter: something new each time, so
    that nothing is kept for a tensor that might have changed."""
    version = getattr(tensor, "_version", None)
    return object() if version is None else version


def base_of(tensor: Tensor) -> Tensor | None:
    """Return what this is a view of. Without the attribute: nothing, and a transposed weight is cast in each call."""
    return getattr(tensor, "_base", None)


def storage_of(tensor: Tensor) -> int:
    """Return a number that tensors in the same storage share. Without its address: that of the memory, which tensors on
    the meta device have none of."""
    storage = tensor.untyped_storage()
    return int(getattr(storage, "_cdata", None) or storage.data_ptr())


def derives_forward() -> bool:
    """Return whether forward-mode derivatives are computed. Without the level: as if they were."""
    return bool(getattr(forward_ad, "_current_level", 0) >= 0)
