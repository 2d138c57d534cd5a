from functools import partial

import triton
import triton.language as tl

from mpkernels.ops._registry import implement
from mpkernels.ops.step.launch_kernel import launch
from mpkernels.ops.step.rules.rmsprop import RMSPROP, rmsprop_


@triton.jit
def scalars(hyperparameters, step):
    lr, alpha, eps = hyperparameters
    return lr, alpha, 1 - alpha, eps


@triton.jit
def step(weight, grad, states, _, scalars):
    lr, alpha, of_square, eps = scalars
    square_avg = states[0] * alpha + grad * of_square * grad
    if grad.dtype.is_fp64():
        return weight - lr * grad / (tl.sqrt(square_avg) + eps), (square_avg,)
    return weight - tl.div_rn(lr * grad, tl.sqrt_rn(square_avg) + eps), (square_avg,)


implement(rmsprop_.step)(partial(launch, RMSPROP, scalars, step))
