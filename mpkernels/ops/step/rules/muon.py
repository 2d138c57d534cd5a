"""The part of Muon that goes element by element, as torch.optim.Muon steps: momentum, and the update that Newton-Schulz
then orthogonalizes. The op's ``params`` are the updates, which this overwrites."""

from typing import NamedTuple

import torch
from torch import Tensor

from mpkernels.ops.step.op import StepOps
from mpkernels.ops.step.rule import Rule


class Scalars(NamedTuple):
    """What all elements of a parameter share."""

    share: Tensor
    nesterov: Tensor


def scalars(momentum: Tensor, nesterov: Tensor, step: Tensor) -> Scalars:
    """``nesterov`` is 1 or 0."""
    return Scalars(1 - momentum, nesterov)


def step(update: Tensor, grad: Tensor, states: list[Tensor], scalars: Scalars) -> tuple[Tensor, list[Tensor]]:
    [buffer] = states
    buffer = buffer + (grad - buffer) * scalars.share
    update = torch.where(scalars.nesterov != 0, buffer + (grad - buffer) * scalars.share, buffer)
    return update, [buffer]


MUON = Rule(
    name="muon",
    states=("momentum_buffer",),
    needed=1,
    not_negative=(),
    hyperparameters=("momentum", "nesterov"),
    may_be_tensors=1,
    saves_steps=False,
    scalars=scalars,
    step=step,
)
muon_ = StepOps(MUON)
