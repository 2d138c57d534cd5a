"""Lion, as its authors publish it (lion_pytorch.py in google/automl)."""

from typing import NamedTuple

from torch import Tensor

from mpkernels.ops.step.op import StepOps
from mpkernels.ops.step.rule import Rule


class Scalars(NamedTuple):
    """What all elements of a parameter share."""

    decay: Tensor
    beta1: Tensor
    weight1: Tensor
    beta2: Tensor
    weight2: Tensor
    lr: Tensor


def scalars(lr: Tensor, beta1: Tensor, beta2: Tensor, weight_decay: Tensor, step: Tensor) -> Scalars:
    return Scalars(1 - lr * weight_decay, beta1, 1 - beta1, beta2, 1 - beta2, lr)


def step(weight: Tensor, grad: Tensor, states: list[Tensor], scalars: Scalars) -> tuple[Tensor, list[Tensor]]:
    [exp_avg] = states
    update = exp_avg * scalars.beta1 + grad * scalars.weight1
    weight = weight * scalars.decay - update.sign() * scalars.lr
    return weight, [exp_avg * scalars.beta2 + grad * scalars.weight2]


LION = Rule(
    name="lion",
    states=("exp_avg",),
    needed=1,
    not_negative=(),
    hyperparameters=("lr", "beta1", "beta2", "weight_decay"),
    may_be_tensors=3,
    saves_steps=False,
    scalars=scalars,
    step=step,
)
lion_ = StepOps(LION)
