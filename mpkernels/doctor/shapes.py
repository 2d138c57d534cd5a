"""Sizes that tensor cores can take as they are."""

import re
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from mpkernels.nn import LinearAct

ALIGNED = 16  # bytes: what a row must be a multiple of for the widest loads, csrc/common/elements.h's too
TILE = 64  # columns: half of what a block of a matrix kernel has


class Advice(NamedTuple):
    """A layer whose shape costs speed, and what to do about it. Print it for a sentence."""

    where: str  #: the layer's name in the model, or its class
    problem: str  #: which of its sizes is the reason
    remedy: str  #: which size to take instead

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}; {self.remedy}"


def advise(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> list[Advice]:
    """What keeps the layers of ``model`` off the fast path of tensor cores in ``dtype``; empty where nothing does.

    >>> mpkernels.doctor.advise(torch.nn.Linear(768, 50257))
    [Advice(where='Linear', problem='out_features=50257 is no multiple of 8', remedy='50304 is')]
    """
    found: list[Advice] = []
    for name, module in model.named_modules():
        where = f"{name} ({type(module).__name__})" if name else type(module).__name__
        found += (each for size in _sizes(module) if (each := of_size(where, *size, dtype)))
        for of_it, param in module.named_parameters(recurse=False):
            if param.dtype == torch.float64:
                found.append(Advice(where, f"{of_it} is fp64, which autocast leaves alone", "fp32 or 16 bits are not"))
            if not param.is_meta and param.data_ptr() % ALIGNED:
                found.append(
                    Advice(where, f"{of_it} begins between multiples of {ALIGNED} bytes", "a clone of it doesn't")
                )
    return found


def of_size(where: str, name: str, size: int, dtype: torch.dtype = torch.bfloat16) -> Advice | None:
    multiple = ALIGNED // dtype.itemsize
    if size % multiple == 0:
        return None
    step = TILE if size > 8 * TILE else multiple
    return Advice(where, f"{name}={size} is no multiple of {multiple}", f"{-(-size // step) * step} is")


_CONVOLUTIONS = nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d


def _sizes(module: nn.Module) -> Iterator[tuple[str, int]]:
    """Those by which rows in memory are long."""
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


def of_sizes(text: str) -> list[Advice] | None:
    """Of a layer that is given by its features, as in 768x50257. None where the text says something else."""
    if re.fullmatch(r"\d+(x\d+)+", text) is None:
        return None
    sizes = [int(size) for size in text.split("x")]
    if 0 in sizes:
        raise ValueError(f"MODEL's sizes must be above 0, got {text!r}")
    each = (of_size(text, "size", size) for size in sizes)
    return [it for it in each if it]
