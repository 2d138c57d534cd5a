"""SGD, as torch.optim.SGD (foreach=False) steps, in its order of operations."""

from typing import NamedTuple

import torch
from torch import Tensor

from mpkernels.ops.step.op import StepOps
from mpkernels.ops.step.rule import Rule


class Scalars(NamedTuple):
    """What all elements of a parameter share."""

    weight_decay: Tensor
    momentum: Tensor
    update_share: Tensor
    nesterov: Tensor
    lr: Tensor


def scalars(
    lr: Tensor, weight_decay: Tensor, momentum: Tensor, dampening: Tensor, nesterov: Tensor, step: Tensor
) -> Scalars:
    """``nesterov`` is 1 or 0. After the first step, the momentum buffer is the grad."""
    is_first = step == 1
    return Scalars(
        weight_decay=weight_decay,
        momentum=torch.where(is_first, 0.0, momentum),
        update_share=torch.where(is_first, 1.0, 1 - dampening),
        nesterov=nesterov * momentum,
        lr=lr,
    )


def step(weight: Tensor, grad: Tensor, states: list[Tensor], scalars: Scalars) -> tuple[Tensor, list[Tensor]]:
    update = grad + weight * scalars.weight_decay
    states = [buffer * scalars.momentum + update * scalars.update_share for buffer in states]
    for buffer in states:
        update = torch.where(scalars.nesterov != 0, update + buffer * scalars.nesterov, buffer)
    return weight - update * scalars.lr, states


SGD = Rule(
    name="sgd",
    states=("momentum_buffer",),
    needed=0,  # the buffer is there with momentum
    not_negative=(),
    hyperparameters=("lr", "weight_decay", "momentum", "dampening", "nesterov"),
    may_be_tensors=2,
    saves_steps=False,
    scalars=scalars,
    step=step,
)
sgd_ = StepOps(SGD)
