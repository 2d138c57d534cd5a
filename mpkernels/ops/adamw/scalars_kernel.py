"""What adamw_'s Triton kernel computes once for a parameter, and whether it steps at all."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

import torch
import triton
import triton.language as tl

from mpkernels.ops._table import FP64

# Words of a group: addresses of lr, beta1 and beta2 where they are tensors, else 0; the dtypes of those; as fp64 lr,
# beta1, beta2, weight_decay, eps, the grads' sign, max_norm.
GROUP = tl.constexpr(13)
LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def load_fp64(word):
    return tl.load(word).to(tl.float64, bitcast=True)


@triton.jit
def hyperparameter(group, which: tl.constexpr):
    address = tl.load(group + which)
    value = load_fp64(group + 6 + which)
    if address != 0:
        if tl.load(group + 3 + which) == FP64:
            value = tl.load(address.to(tl.pointer_type(tl.float64)))
        else:
            value = tl.load(address.to(tl.pointer_type(tl.float32))).to(tl.float64)
    return value


@triton.jit
def unscale_factor(grad_scale):
    factor = 1.0
    if grad_scale is not None:
        factor = (1 / tl.load(grad_scale).to(tl.float64)).to(tl.float32).to(tl.float64)
    return factor


@triton.jit
def unscaled_norm(grad_scale, total_sumsq):
    return tl.sqrt(tl.load(total_sumsq)) * unscale_factor(grad_scale)


@triton.jit
def scalars_of(group, steps_before, grad_scale, total_sumsq):
    """Return all that is the same for a whole parameter, in fp64."""
    lr, beta1, beta2 = hyperparameter(group, 0), hyperparameter(group, 1), hyperparameter(group, 2)
    factor = unscale_factor(grad_scale)
    if total_sumsq is not None:
        coefficient = load_fp64(group + 12) / (unscaled_norm(grad_scale, total_sumsq) + 1e-6)
        factor *= tl.where(coefficient > 1, 1, coefficient)
    step = steps_before.to(tl.float64) + 1
    correction2 = tl.sqrt(1 - tl.exp2(step * tl.log2(beta2)))
    step_size = lr / (1 - tl.exp2(step * tl.log2(beta1))) * correction2
    decay, eps = 1 - lr * load_fp64(group + 9), load_fp64(group + 10) * correction2
    return factor * load_fp64(group + 11), decay, 1 - beta1, beta2, 1 - beta2, step_size, eps


@triton.jit
def rounded(scalars):
    """Return them in fp32."""
    factor, decay, weight1, beta2, weight2, step_size, eps = scalars
    return (
        factor.to(tl.float32), decay.to(tl.float32), weight1.to(tl.float32), beta2.to(tl.float32),
        weight2.to(tl.float32), step_size.to(tl.float32), eps.to(tl.float32),
    )  # fmt: skip


@triton.jit
def is_skipped(grad_scale, found_inf, total_sumsq):
    """Finite grads overflow, too, where a scale below 1 is taken off them: their norm is then beyond fp32."""
    skipped = False
    if found_inf is not None:
        skipped = tl.load(found_inf) != 0
    if grad_scale is not None and total_sumsq is not None:
        skipped |= unscaled_norm(grad_scale, total_sumsq) > LARGEST
    return skipped


@triton.jit
def write_outcome(skipped, grad_scale, total_sumsq, outcome, skipped_steps):
    if outcome is not None:
        if total_sumsq is not None:
            tl.store(outcome, unscaled_norm(grad_scale, total_sumsq))
        tl.store(outcome + 1, tl.where(skipped, 1.0, 0.0))
    if skipped_steps is not None:
        tl.store(skipped_steps, tl.load(skipped_steps) + tl.where(skipped, 1.0, 0.0))
