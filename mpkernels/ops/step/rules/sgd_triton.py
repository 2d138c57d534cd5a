"""SGD's rule in Triton, equal to sgd.py to the bit: tests/ops/step/test_rules_same_bits.py compares them."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from functools import partial

import triton
import triton.language as tl

from mpkernels.ops._registry import implement
from mpkernels.ops.step.launch_kernel import launch
from mpkernels.ops.step.rules.sgd import SGD, sgd_


@triton.jit
def scalars(hyperparameters, step):
    lr, weight_decay, momentum, dampening, nesterov = hyperparameters
    is_first = step == 1
    update_share = tl.where(is_first, 1.0, 1 - dampening)
    return weight_decay, tl.where(is_first, 0.0, momentum), update_share, nesterov * momentum, lr


@triton.jit
def step(weight, grad, states, has_momentum, scalars):
    weight_decay, momentum, update_share, nesterov, lr = scalars
    update = grad + weight * weight_decay
    buffer = states[0] * momentum + update * update_share
    with_momentum = tl.where(nesterov != 0, update + buffer * nesterov, buffer)
    return weight - tl.where(has_momentum, with_momentum, update) * lr, (buffer,)


implement(sgd_.step)(partial(launch, SGD, scalars, step))
