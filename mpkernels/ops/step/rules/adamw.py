"""AdamW, as torch.optim.AdamW (foreach=False) steps, in its order of operations."""

from typing import NamedTuple

import torch
from torch import Tensor

from mpkernels.ops.step.op import StepOps
from mpkernels.ops.step.rule import Rule


class Scalars(NamedTuple):
    """What all elements of a parameter share."""

    decay: Tensor
    weight1: Tensor
    beta2: Tensor
    weight2: Tensor
    step_size: Tensor
    eps: Tensor


def scalars(lr: Tensor, beta1: Tensor, beta2: Tensor, weight_decay: Tensor, eps: Tensor, step: Tensor) -> Scalars:
    """step_size and eps include the root's bias correction, which saves a division per element."""
    correction1, correction2 = 1 - beta1**step, (1 - beta2**step).sqrt()
    return Scalars(
        decay=1 - lr * weight_decay,
        weight1=1 - beta1,
        beta2=beta2,
        weight2=1 - beta2,
        step_size=lr / correction1 * correction2,
        eps=eps * correction2,
    )


def step(weight: Tensor, grad: Tensor, states: list[Tensor], scalars: Scalars) -> tuple[Tensor, list[Tensor]]:
    exp_avg, exp_avg_sq, *largest = states
    weight = weight * scalars.decay
    exp_avg = exp_avg + (grad - exp_avg) * scalars.weight1
    exp_avg_sq = exp_avg_sq * scalars.beta2 + grad * scalars.weight2 * grad
    largest = [torch.maximum(before, exp_avg_sq) for before in largest]
    root = [exp_avg_sq, *largest][-1].double().sqrt().to(weight.dtype)  # torch's fp32 root is an ulp off at times
    weight = weight - scalars.step_size * exp_avg / (root + scalars.eps)
    return weight, [exp_avg, exp_avg_sq, *largest]


ADAMW = Rule(
    name="adamw",
    states=("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    needed=2,  # max_exp_avg_sq is there with amsgrad
    not_negative=("exp_avg_sq", "max_exp_avg_sq"),
    hyperparameters=("lr", "beta1", "beta2", "weight_decay", "eps"),
    may_be_tensors=3,
    saves_steps=True,
    scalars=scalars,
    step=step,
)
adamw_ = StepOps(ADAMW)
