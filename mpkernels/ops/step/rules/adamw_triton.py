"""AdamW's rule in Triton."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from functools import partial

import triton
import triton.language as tl

from mpkernels.ops._registry import implement
from mpkernels.ops.step.launch_kernel import begin_step, launch, not_negative_bits, step_chunk
from mpkernels.ops.step.rules.adamw import ADAMW, adamw_

STATES, NEEDED = tl.constexpr(len(ADAMW.states)), tl.constexpr(ADAMW.needed)
NOT_NEGATIVE = tl.constexpr(not_negative_bits(ADAMW))
TENSORS, HYPERPARAMETERS = tl.constexpr(ADAMW.tensors), tl.constexpr(len(ADAMW.hyperparameters))


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


@triton.jit(do_not_specialize=["tensors"])
def adamw_kernel(
    rows, call, tensors, grad_scale, found_inf, total_sumsq, outcome, skipped_steps, report, of_chunk,
    IS_CLIPPED: tl.constexpr, HAS_FP64: tl.constexpr, HAS_INT8: tl.constexpr, HAS_OPTIONAL: tl.constexpr,
    HAS_REMAINDER: tl.constexpr, DTYPE: tl.constexpr, GRAD_DTYPE: tl.constexpr, STATE_DTYPE: tl.constexpr,
    WEIGHT_DTYPE: tl.constexpr,
):  # fmt: skip
    if begin_step(
        rows, call, tensors, grad_scale, found_inf, total_sumsq, outcome, skipped_steps, report, of_chunk
    ):  # fmt: skip
        return
    step_chunk(
        rows, call, tensors, grad_scale, total_sumsq if IS_CLIPPED else None,
        HAS_FP64, HAS_INT8, HAS_OPTIONAL, HAS_REMAINDER, DTYPE, GRAD_DTYPE, STATE_DTYPE, WEIGHT_DTYPE,
        STATES, NEEDED, NOT_NEGATIVE, TENSORS, HYPERPARAMETERS, scalars, step,
    )  # fmt: skip


implement(adamw_.step)(partial(launch, ADAMW, adamw_kernel))
