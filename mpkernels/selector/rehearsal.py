"""A step of a model that leaves no trace."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from mpkernels._torch_private.sharded import is_fsdp1s
from mpkernels._torch_private.tensors import leaves_of, map_leaves
from mpkernels._torch_private.tracing import before_compile, uncompiled
from mpkernels.parts import is_sharded


def rehearse(model: nn.Module, inputs: Sequence[Any], keywords: Mapping[str, Any]) -> None:
    """Run the model forward and, where autograd is on, backward. It gets parameters that share the memory of its own,
    and copies of buffers and inputs: so grads and BatchNorm's statistics stay, and no hook of an optimizer or of
    DistributedDataParallel hears of it. torch's random numbers go on as if nothing had been."""
    step = _Step(_inner(model))
    params = dict(step.named_parameters())
    _refuse_parts(list(params.values()))
    params = {name: nn.Parameter(it.detach(), it.requires_grad) for name, it in params.items()}
    buffers = {name: _copy(it) for name, it in step.named_buffers()}
    args, kwargs = map_leaves(_copy, (tuple(inputs), dict(keywords)))
    tensors = [*params.values(), *buffers.values(), *leaves_of((args, kwargs))]
    devices = {it.device.index for it in tensors if isinstance(it, Tensor) and it.is_cuda}
    with torch.random.fork_rng(sorted(devices)), uncompiled(), _no_cast_kept():
        functional_call(step, params | buffers, args, kwargs)


class _Step(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any, **keywords: Any) -> None:
        outputs = leaves_of(self.model(*inputs, **keywords))
        roots = [it for it in outputs if isinstance(it, Tensor) and it.requires_grad]
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(it) for it in roots])


def _inner(model: nn.Module) -> nn.Module:
    """Return what torch.compile and DistributedDataParallel wrap."""
    if isinstance(model, DistributedDataParallel):
        return _inner(model.module)
    compiled = before_compile(model)
    return model if compiled is None else _inner(compiled)


def _refuse_parts(params: Sequence[Tensor]) -> None:
    if any(is_fsdp1s(it) or is_sharded(it) for it in params):
        raise TypeError(
            "selector.warm_up: model must have whole parameters, got parts that FSDP or tensor parallelism made; "
            "warm up the model, or one of its blocks, before"
        )


def _copy(it: Any) -> Any:
    return it.detach().clone().requires_grad_(it.requires_grad) if isinstance(it, Tensor) else it


@contextmanager
def _no_cast_kept() -> Iterator[None]:
    """Autocast would keep casts of these parameters until its block ends."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
