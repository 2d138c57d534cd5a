"""Finds layers whose sizes keep tensor cores from their fast path, and weights that an optimizer can't move."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mpkernels._shared.call_model import refuse_no_model, refuse_no_optimizer
from mpkernels._shared.dtypes import dtype_of
from mpkernels._shared.parameters import unwrapped
from mpkernels.distributed.parts import part_of
from mpkernels.nn import LinearAct
from mpkernels.optim.masters import needs_master
from mpkernels.optim.skipping_optimizer import SkippingOptimizer

_ROW = 16  # bytes: the widest loads need rows whose length is a multiple of this
_TILE = 64  # columns: half a block of a matrix kernel


class Advice(NamedTuple):
    """What costs speed or learning, and what to do about it. Print it for a sentence."""

    where: str  #: the layer's name in the model, or its class; or the parameter group
    problem: str  #: the size, or the learning rate, that is the reason
    remedy: str  #: the size to take instead, or an optimizer

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}; {self.remedy}"


def advise(
    model: nn.Module, dtype: torch.dtype | str = torch.bfloat16, optimizer: torch.optim.Optimizer | None = None
) -> list[Advice]:
    """Return what keeps the model's layers off the fast path of tensor cores in a dtype, and which 16-bit weights
    torch's Adam, AdamW, NAdam, RAdam or Adamax can't move, because its steps are smaller than a weight's last bit.

    >>> mpkernels.doctor.advise(torch.nn.Linear(768, 50257))
    [Advice(where='Linear', problem='out_features=50257 is no multiple of 8', remedy='50304 is')]

    Args:
        model: the model.
        dtype: the dtype in which the model computes.
        optimizer: its optimizer, if weights are to be looked at. Its first steps move each value by about ``lr``.
    """
    refuse_no_model("advise", model)
    if optimizer is not None:
        refuse_no_optimizer("advise", optimizer)
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
    return found + list(_weights_that_stand_still(model, unwrapped(optimizer)))


_STEPS_BY_LR = torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax


def _weights_that_stand_still(model: nn.Module, optimizer: Any) -> Iterator[Advice]:
    if not isinstance(optimizer, _STEPS_BY_LR) or isinstance(optimizer, SkippingOptimizer):
        return
    names = {param: name for name, param in model.named_parameters()}
    for i, group in enumerate(optimizer.param_groups):
        lr = max(float(group["lr"]), float(group.get("initial_lr", 0)))  # a schedule may begin at 0
        narrow = [param for param in group["params"] if needs_master(param) and not param.is_meta]
        if still := [param for param in narrow if not _moves(part_of(param.detach()), lr)]:
            count = f"{len(still)} of {len(narrow)} 16-bit parameters, such as {names.get(still[0], 'one')}"
            problem = f"lr={lr:g} is too small to move most values in {count}"
            yield Advice(f"param_groups[{i}]", problem, "optimizers of mpkernels.optim keep fp32 masters")


def _moves(weight: Tensor, step: float) -> bool:
    """Return whether at least half of a weight's values change if a step is added, or subtracted."""
    moved = ((weight.float() + step).to(weight.dtype) != weight) | ((weight.float() - step).to(weight.dtype) != weight)
    return bool(2 * moved.sum() >= moved.numel())


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
