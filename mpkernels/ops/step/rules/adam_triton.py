"""Adam's rule in Triton, equal to adam.py to the bit: tests/ops/step/test_rules_same_bits.py compares them."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from functools import partial

import triton
import triton.language as tl

from mpkernels.ops._registry import implement
from mpkernels.ops.step.launch_kernel import launch
from mpkernels.ops.step.rules.adam import ADAM, adam_
from mpkernels.ops.step.rules.adamw_triton import scalars as scalars_of_adamw
from mpkernels.ops.step.rules.adamw_triton import step as step_of_adamw


@triton.jit
def scalars(hyperparameters, step):
    lr, beta1, beta2, weight_decay, eps, is_decoupled = hyperparameters
    decoupled = tl.where(is_decoupled != 0, weight_decay, 0.0)
    return (weight_decay - decoupled,) + scalars_of_adamw((lr, beta1, beta2, decoupled, eps), step)  # noqa: RUF005


@triton.jit
def step(weight, grad, states, amsgrad, scalars):
    return step_of_adamw(weight, grad + weight * scalars[0], states, amsgrad, scalars[1:])


implement(adam_.step)(partial(launch, ADAM, scalars, step))
