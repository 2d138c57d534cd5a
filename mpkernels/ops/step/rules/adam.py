"""Adam, as torch.optim.Adam (foreach=False) steps: like AdamW, but a decay that isn't decoupled is added to the
grad."""

from typing import NamedTuple

import torch
from torch import Tensor

from mpkernels.ops.step.op import StepOps
from mpkernels.ops.step.rules import adamw


class Scalars(NamedTuple):
    """What all elements of a parameter share."""

    joined_decay: Tensor
    decay: Tensor
    weight1: Tensor
    beta2: Tensor
    weight2: Tensor
    step_size: Tensor
    eps: Tensor


def scalars(
    lr: Tensor, beta1: Tensor, beta2: Tensor, weight_decay: Tensor, eps: Tensor, decoupled: Tensor, step: Tensor
) -> Scalars:
    """``decoupled`` is 1 or 0."""
    decoupled_decay = torch.where(decoupled != 0, weight_decay, 0.0)
    return Scalars(weight_decay - decoupled_decay, *adamw.scalars(lr, beta1, beta2, decoupled_decay, eps, step))


def step(weight: Tensor, grad: Tensor, states: list[Tensor], scalars: Scalars) -> tuple[Tensor, list[Tensor]]:
    joined_decay, *adamw_scalars = scalars
    return adamw.step(weight, grad + weight * joined_decay, states, adamw.Scalars(*adamw_scalars))


ADAM = adamw.ADAMW._replace(
    name="adam", hyperparameters=(*adamw.ADAMW.hyperparameters, "decoupled"), scalars=scalars, step=step
)
adam_ = StepOps(ADAM)
