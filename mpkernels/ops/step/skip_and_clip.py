"""Decides whether a step is skipped, and computes what its grads are multiplied by: the loss scale's inverse times
max_norm's coefficient. csrc/step/skip_and_clip.h and skip_and_clip_kernel.py do the same."""

import math

import torch
from torch import Tensor


def grad_factor(like: Tensor, grad_scale: Tensor | None, total_sumsq: Tensor | None, max_norm: float) -> Tensor:
    """Return the factor that unscales and clips the grads, in fp64, on the device of ``like``."""
    factor = _unscale_factor(like, grad_scale)
    if total_sumsq is None or not max_norm < math.inf:
        return factor
    return factor * (max_norm / (_unscaled_norm(grad_scale, total_sumsq) + 1e-6)).clamp(max=1)


def _unscale_factor(like: Tensor, grad_scale: Tensor | None) -> Tensor:
    if grad_scale is None:
        return torch.ones_like(like.reshape(()), dtype=torch.float64)
    return (1 / grad_scale.reshape(()).double()).float().double()


def _unscaled_norm(grad_scale: Tensor | None, total_sumsq: Tensor) -> Tensor:
    return total_sumsq.reshape(()).sqrt() * _unscale_factor(total_sumsq, grad_scale)


def _is_skipped(grad_scale: Tensor | None, found_inf: Tensor | None, total_sumsq: Tensor | None) -> Tensor | None:
    """Return whether the step is skipped. A scale below 1 can make finite grads overflow when they are unscaled: their
    norm is then beyond fp32. A scale of 0, or nearly so, makes NaN of grads of 0: its inverse is infinite."""
    is_skipped = None if found_inf is None else found_inf.reshape(()) != 0
    if grad_scale is not None:
        factor = _unscale_factor(grad_scale, grad_scale)
        unscaled = factor if total_sumsq is None else _unscaled_norm(grad_scale, total_sumsq)
        is_beyond = ~(unscaled <= torch.finfo(torch.float32).max)
        is_skipped = is_beyond if is_skipped is None else is_skipped | is_beyond
    return is_skipped


def write_outcome(
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    total_sumsq: Tensor | None,
    outcome: Tensor | None,
    skipped_steps: Tensor | None,
) -> Tensor | None:
    """Return whether the step is skipped. Write that and the norm of the unscaled grads to ``outcome``, and count it
    in ``skipped_steps``."""
    is_skipped = _is_skipped(grad_scale, found_inf, total_sumsq)
    if outcome is not None and total_sumsq is not None:
        outcome[0] = _unscaled_norm(grad_scale, total_sumsq)
    if outcome is not None:
        outcome[1] = 0.0 if is_skipped is None else is_skipped.float()
    if skipped_steps is not None and is_skipped is not None:
        skipped_steps.add_(is_skipped.float())
    return is_skipped
