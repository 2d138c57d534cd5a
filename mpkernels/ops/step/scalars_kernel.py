"""What a step's Triton kernel computes once for a parameter, and whether it steps at all."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator,assignment"

import torch
import triton
import triton.language as tl

from mpkernels.ops._table import FP64

# Words of a group: the addresses of hyperparameters that are tensors, else 0; the dtypes of those; as fp64 all
# hyperparameters by value, the grads' sign, max_norm.
LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def load_fp64(word):
    return tl.load(word).to(tl.float64, bitcast=True)


@triton.jit
def hyperparameter(group, which: tl.constexpr, TENSORS: tl.constexpr):
    value = load_fp64(group + 2 * TENSORS + which)
    if which < TENSORS:
        address = tl.load(group + which)
        if address != 0:
            if tl.load(group + TENSORS + which) == FP64:
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
def grad_factor(sign_and_max_norm, grad_scale, total_sumsq):
    """Return what grads are multiplied by, in fp64."""
    factor = unscale_factor(grad_scale)
    if total_sumsq is not None:
        coefficient = load_fp64(sign_and_max_norm + 1) / (unscaled_norm(grad_scale, total_sumsq) + 1e-6)
        factor *= tl.where(coefficient > 1, 1, coefficient)
    return factor * load_fp64(sign_and_max_norm)


@triton.jit
def scalars_of(
    group,
    steps_before,
    grad_scale,
    total_sumsq,
    TENSORS: tl.constexpr,
    HYPERPARAMETERS: tl.constexpr,
    SCALARS: tl.constexpr,
    NEEDED: tl.constexpr,
):
    """Return what grads are multiplied by, and the rule's scalars, in fp64."""
    sign_and_max_norm, hyperparameters = group + 2 * TENSORS + HYPERPARAMETERS, ()
    if NEEDED == 0:  # a kernel without states has so few registers that hyperparameters spill around these divisions
        factor = grad_factor(sign_and_max_norm, grad_scale, total_sumsq)
    for which in tl.static_range(HYPERPARAMETERS):
        hyperparameters += (hyperparameter(group, which, TENSORS),)
    if NEEDED > 0:
        factor = grad_factor(sign_and_max_norm, grad_scale, total_sumsq)
    return factor, SCALARS(hyperparameters, steps_before.to(tl.float64) + 1)


@triton.jit
def rounded(scalars):
    """Return them in fp32."""
    factor, of_rule = scalars
    of_rule_in_fp32 = ()
    for i in tl.static_range(len(of_rule)):
        of_rule_in_fp32 += (of_rule[i].to(tl.float32),)
    return factor.to(tl.float32), of_rule_in_fp32


@triton.jit
def is_skipped(grad_scale, found_inf, total_sumsq):
    """A scale below 1 can make finite grads overflow when they are unscaled: their norm is then beyond fp32."""
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
