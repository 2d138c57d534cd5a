"""Lion's rule in Triton, equal to lion.py to the bit: tests/ops/step/test_rules_same_bits.py compares them."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from functools import partial

import triton
import triton.language as tl

from mpkernels.ops._registry import implement
from mpkernels.ops.step.launch_kernel import launch
from mpkernels.ops.step.rules.lion import LION, lion_


@triton.jit
def scalars(hyperparameters, step):
    lr, beta1, beta2, weight_decay = hyperparameters
    return 1 - lr * weight_decay, beta1, 1 - beta1, beta2, 1 - beta2, lr


@triton.jit
def step(weight, grad, states, _, scalars):
    decay, beta1, weight1, beta2, weight2, lr = scalars
    update = states[0] * beta1 + grad * weight1
    sign = tl.where(update > 0, 1.0, tl.where(update < 0, -1.0, 0.0)).to(weight.dtype)
    return weight * decay - sign * lr, (states[0] * beta2 + grad * weight2,)


implement(lion_.step)(partial(launch, LION, scalars, step))
