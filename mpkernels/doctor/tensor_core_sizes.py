"""Finds layers whose sizes keep tensor cores from their fast path."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from mpkernels._shared.call_model import refuse_no_model
from mpkernels._shared.dtypes import dtype_of
from mpkernels.nn import LinearAct

_ROW = 16  # bytes: the widest loads need rows whose length is a multiple of this
_TILE = 64  # columns: half a block of a matrix kernel


class Advice(NamedTuple):
    """A layer whose shape costs speed, and what to do about it. Print it for a sentence."""

    where: str  #: the layer's name in the model, or its class
    problem: str  #: the size that is the reason
    remedy: str  #: the size to take instead

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}; {self.remedy}"


def advise(model: nn.Module, dtype: torch.dtype | str = torch.bfloat16) -> list[Advice]:
    """Return what keeps the model's layers off the fast path of tensor cores in a dtype; empty if nothing does.

    >>> mpkernels.doctor.advise(torch.nn.Linear(768, 50257))
    [Advice(where='Linear', problem='out_features=50257 is no multiple of 8', remedy='50304 is')]
    """
    refuse_no_model("advise", model)
    dtype = dtype_of(dtype)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"advise: dtype must be a torch.dtype, got {dtype!r}")
    found, multiple = [], _ROW // dtype.itemsize
    for name, module in model.named_modules():
        where = f"{name} ({type(module).__name__})" if name else type(module).__name__
        for size_name, size in _sizes(module):
            if size % multiple:
                step = _TILE if size > 8 * _TILE else multiple
                problem = f"{size_name}={size} is no multiple of {multiple}"
                found.append(Advice(where, problem, f"{-(-size // step) * step} is"))
    return found


_CONVOLUTIONS = nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d


def _sizes(module: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield the lengths of the rows that a layer multiplies."""
    if isinstance(module, nn.Linear | LinearAct):
        yield "in_features", module.in_features
        yield "out_features", module.out_features
    elif isinstance(module, _CONVOLUTIONS):
        yield "in_channels / groups", module.in_channels // module.groups
        yield "out_channels / groups", module.out_channels // module.groups
    elif isinstance(module, nn.Embedding):
        yield "embedding_dim", module.embedding_dim
    elif isinstance(module, nn.MultiheadAttention):
        yield "embed_dim / num_heads", module.embed_dim // module.num_heads
