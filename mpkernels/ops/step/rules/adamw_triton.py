"""AdamW's rule in Triton, equal to adamw.py to the bit: tests/ops/step/test_rules_same_bits.py compares them."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from functools import partial

import triton
import triton.language as tl

from mpkernels.ops._registry import implement
from mpkernels.ops.step.launch_kernel import launch
from mpkernels.ops.step.rules.adamw import ADAMW, adamw_


@triton.jit
def scalars(hyperparameters, step):
    lr, beta1, beta2, weight_decay, eps = hyperparameters
    correction2 = tl.sqrt(1 - tl.exp2(step * tl.log2(beta2)))
    step_size = lr / (1 - tl.exp2(step * tl.log2(beta1))) * correction2
    return 1 - lr * weight_decay, 1 - beta1, beta2, 1 - beta2, step_size, eps * correction2


@triton.jit
def step(weight, grad, states, amsgrad, scalars):
    exp_avg, exp_avg_sq, largest = states
    decay, weight1, beta2, weight2, step_size, eps = scalars
    weight *= decay
    exp_avg += (grad - exp_avg) * weight1
    exp_avg_sq = exp_avg_sq * beta2 + grad * weight2 * grad
    larger = tl.where((largest != largest) | (largest > exp_avg_sq), largest, exp_avg_sq)
    largest = tl.where(amsgrad, larger, exp_avg_sq)
    if grad.dtype.is_fp64():
        weight -= step_size * exp_avg / (tl.sqrt(largest) + eps)
    else:
        weight -= tl.div_rn(step_size * exp_avg, tl.sqrt_rn(largest) + eps)
    return weight, (exp_avg, exp_avg_sq, largest)


implement(adamw_.step)(partial(launch, ADAMW, scalars, step))
