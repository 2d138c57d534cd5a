"""A cache of 16-bit casts of fp32 parameters. It lives as long as torch's own: until the autocast block ends. Under
``amp.accumulate``, which knows the blocks of one step, it lives until the step.

If a parameter is changed in place, its version changes, and it is cast anew. A write through ``parameter.data`` changes
no version, so it goes unnoticed until the block (or the step) ends, as with torch's own cache.

The casts of a block are stored on an autograd node that torch's cache keeps alive. They go when torch clears its cache.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, is_autocast_cache_enabled

from mpkernels._torch_private.devices import current_stream
from mpkernels._torch_private.modes import without_dispatch_modes
from mpkernels._torch_private.tensors import base_of, version_of


class _Kept(NamedTuple):
    parameter: Tensor  # kept alive, so that no other parameter gets its id
    version: object
    data_ptr: int
    stream: int | None  # None on a CPU
    cast: Tensor

    def serves(self, parameter: Tensor, dtype: torch.dtype) -> bool:
        """Return whether this still is the parameter's cast."""
        return (
            self.cast.dtype is dtype
            and self.version == version_of(parameter)
            and self.data_ptr == parameter.data_ptr()
            and is_autocast_cache_enabled()
            and (self.stream is None or (self.stream == _stream(parameter) and not _is_captured(parameter)))
        )


class _Casts(dict[int, _Kept]):
    """The casts of an autocast block, or of a step, by the parameter's id."""

    is_over = False


def _no_block() -> _Casts | None:
    return None


_block: Any = _no_block  # a weak reference


class _Thread(threading.local):
    step: _Casts | None = None  # the casts of ``one_step``


_thread = _Thread()


@contextmanager
def one_step() -> Iterator[None]:
    """Keep this thread's casts across autocast blocks, until this context ends or another one begins. Call ``clear``
    before the weights are stepped."""
    mine = _thread.step = _Casts()
    try:
        yield
    finally:
        mine.clear()
        mine.is_over = True  # interleaved contexts end in any order


def cast(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``parameter.detach().to(dtype)``, which nobody may write to."""
    step = _thread.step
    casts: _Casts | None = _block() if step is None or step.is_over else step
    kept = None if casts is None else casts.get(id(parameter))
    if kept is not None and kept.serves(parameter, dtype):
        return kept.cast
    if not parameter.is_leaf and _is_transpose_of_a_leaf(parameter):
        return cast(base_of(parameter), dtype).t()  # type: ignore[arg-type]
    made = parameter.detach().to(dtype)
    if _may_keep(parameter):
        casts = _enter_block(parameter.device.type, dtype) if casts is None else casts
        casts[id(parameter)] = _Kept(parameter, version_of(parameter), parameter.data_ptr(), _stream(parameter), made)
    return made


def _stream(parameter: Tensor) -> int | None:
    """Return a number of the stream on which the parameter is cast."""
    return current_stream(parameter.device.index) if parameter.is_cuda else None


def clear() -> None:
    """Forget every cast."""
    for casts in (_block(), _thread.step):
        if casts is not None:
            casts.clear()


def _is_transpose_of_a_leaf(tensor: Tensor) -> bool:
    """Return whether this is a transposed leaf, as GPT-2 keeps its weights. Both share a version, so that a change of
    either is seen."""
    base = base_of(tensor)
    return (
        base is not None
        and base.is_leaf
        and tensor.requires_grad
        and base.dim() == tensor.dim() == 2
        and (tensor.dtype, tensor.data_ptr(), tensor.is_neg()) == (base.dtype, base.data_ptr(), base.is_neg())
        and (tensor.shape, tensor.stride()) == (base.shape[::-1], base.stride()[::-1])
    )


def _may_keep(parameter: Tensor) -> bool:
    """Return whether torch's own cache would keep the cast. A CUDA graph keeps none: its replays would miss a step."""
    return (
        parameter.requires_grad
        and parameter.is_leaf
        and is_autocast_cache_enabled()
        and torch.is_grad_enabled()
        and not parameter.is_inference()
        and not _is_captured(parameter)
    )


def _is_captured(parameter: Tensor) -> bool:
    return parameter.is_cuda and torch.cuda.is_current_stream_capturing()


def _enter_block(device_type: str, dtype: torch.dtype) -> _Casts:
    """Make torch's autocast cast an empty tensor, and store a new block of casts on the node that torch's cache keeps.
    The op saves nothing, so that counts of saved tensors stay right."""
    global _block
    with without_dispatch_modes():
        product: Any = torch.addmm(*_empty_ones(device_type, dtype))
    (to_copy, _), *_ = product.grad_fn.next_functions
    block: _Casts = to_copy.metadata.setdefault(__name__, _Casts())
    _block = ref(block)
    return block


@cache
def _empty_ones(device_type: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return an empty tensor that autocast casts, and two factors that have its dtype already."""
    factor = torch.empty(0, 0, dtype=dtype, device=device_type)
    return torch.empty_like(factor, dtype=torch.float32, requires_grad=True), factor, factor
