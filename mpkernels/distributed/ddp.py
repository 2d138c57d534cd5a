"""Finds the parameters whose grads a DistributedDataParallel exchanges, and exchanges grads in its place. A parameter
doesn't show its wrapper, so all wrappers are tracked."""

import gc
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, distributed, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

_wrappers: WeakSet[DistributedDataParallel] = WeakSet()
_made = 0
_BUCKET_BYTES = 25 * 2**20  # DistributedDataParallel's own default


@cache
def watch() -> None:
    """Find the wrappers that exist, and register those that will be made."""
    if distributed.is_available() and distributed.is_initialized():  # else there is none yet
        for thing in gc.get_objects():
            if issubclass(type(thing), DistributedDataParallel):
                _note(thing)
    register_module_module_registration_hook(_note)


def _note(module: Any, name: str = "", submodule: Any = None) -> None:
    global _made
    if isinstance(module, DistributedDataParallel):
        _wrappers.add(module)
        _made += 1


def made() -> int:
    """Return how many wrappers were made so far."""
    return _made


def refuse(op: str, params: Sequence[Tensor], reason: str) -> None:
    """Raise if a wrapper exchanges the grad of one of ``params``. ``reason`` says what to do instead."""
    exchanged = {id(param) for wrapper in list(_wrappers) for param in exchanged_by(wrapper)}
    for i, param in enumerate(params):
        if id(param) in exchanged:
            shape = tuple(param.shape)
            raise RuntimeError(f"{op}: params[{i}] of shape {shape} must not be DistributedDataParallel's, {reason}")


def wrappers_in(model: nn.Module | None) -> list[DistributedDataParallel]:
    return (
        [] if model is None else [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    )


def exchanged_by(wrapper: DistributedDataParallel) -> list[Tensor]:
    ignored = getattr(wrapper, "parameters_to_ignore", ())
    return [param for name, param in wrapper.module.named_parameters() if name not in ignored]


@torch.no_grad()
def exchange(op: str, wrapper: DistributedDataParallel) -> None:
    """Replace each grad by its mean over the wrapper's processes, as the wrapper's backward would outside no_sync.
    Grads may have another dtype than their parameters, which the wrapper's own buckets refuse."""
    params = [param for param in exchanged_by(wrapper) if param.requires_grad]
    if wrapper.find_unused_parameters:
        _fill_in(params, wrapper.process_group)
        params = [param for param in params if param.grad is not None]
    grads = []
    for param in params:
        if param.grad is None:
            raise RuntimeError(
                f"{op}: a parameter of shape {tuple(param.shape)} must have a grad in each process, got none; give "
                "DistributedDataParallel find_unused_parameters=True"
            )
        grads.append(param.grad)
    for bucket in _buckets(grads):
        flat = torch.cat([grad.reshape(-1) for grad in bucket])
        flat /= distributed.get_world_size(wrapper.process_group)
        distributed.all_reduce(flat, group=wrapper.process_group)
        for grad, mean in zip(bucket, flat.split([grad.numel() for grad in bucket]), strict=True):
            grad.copy_(mean.view(grad.shape))
    wrapper.require_forward_param_sync = True  # the next forward broadcasts buffers, as after DDP's exchange


def _fill_in(params: Sequence[Tensor], group: Any) -> None:
    """Give a grad of zeros to each parameter that is used in other processes alone. The host waits."""
    if not params:
        return
    are_used = torch.tensor([param.grad is not None for param in params], dtype=torch.int32, device=params[0].device)
    distributed.all_reduce(are_used, distributed.ReduceOp.MAX, group)
    for param, is_used in zip(params, are_used.tolist(), strict=True):
        if is_used and param.grad is None:
            param.grad = torch.zeros_like(param, dtype=param.grad_dtype)


def _buckets(grads: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Divide the grads into runs of one dtype and device that are exchanged by one call each, of at most 25 MB or
    one grad."""
    bucket: list[Tensor] = []
    size = 0
    for grad in grads:
        is_like = bucket and (grad.dtype, grad.device) == (bucket[0].dtype, bucket[0].device)
        if bucket and not (is_like and size + grad.nbytes <= _BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(grad)
        size += grad.nbytes
    if bucket:
        yield bucket
