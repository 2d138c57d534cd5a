"""skip_and_clip.py in Triton: whether a step is skipped, and what its grads are multiplied by."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator,assignment"

import torch
import triton
import triton.language as tl

LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def load_fp64(word):
    return tl.load(word).to(tl.float64, bitcast=True)


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
def is_skipped(grad_scale, found_inf, total_sumsq):
    """Return whether the step is skipped. A scale below 1 can make finite grads overflow when they are unscaled: their
    norm is then beyond fp32. A scale of 0, or nearly so, makes NaN of grads of 0: its inverse is infinite."""
    skipped = False
    if found_inf is not None:
        skipped = tl.load(found_inf) != 0
    if grad_scale is not None:
        if total_sumsq is not None:
            skipped |= not (unscaled_norm(grad_scale, total_sumsq) <= LARGEST)
        else:
            skipped |= not (unscale_factor(grad_scale) <= LARGEST)
    return skipped


@triton.jit
def write_outcome(skipped, grad_scale, total_sumsq, outcome, skipped_steps):
    if outcome is not None:
        if total_sumsq is not None:
            tl.store(outcome, unscaled_norm(grad_scale, total_sumsq))
        tl.store(outcome + 1, tl.where(skipped, 1.0, 0.0))
    if skipped_steps is not None:
        tl.store(skipped_steps, tl.load(skipped_steps) + tl.where(skipped, 1.0, 0.0))
