"""The formulas of activations.py for Triton kernels: fp32 in, fp32 out, no library that the interpreter lacks."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from math import pi, sqrt

import triton
import triton.language as tl

from mpkernels.ops.linear import activations

LINEAR = tl.constexpr(activations.LINEAR)
CUBIC = tl.constexpr(activations.CUBIC)
DENSITY = tl.constexpr(1 / sqrt(2 * pi))  # a Gaussian's density at 0


@triton.jit
def sigmoid(z):
    return 1 / (1 + tl.exp(-z))


@triton.jit
def logistic(z):
    """Return sigmoid(z) and sigmoid(-z), equally accurate; 1 - sigmoid(z) would cancel."""
    power = tl.exp(-tl.abs(z))
    large = 1 / (1 + power)
    small = power * large
    return tl.where(z < 0, small, large), tl.where(z < 0, large, small)


@triton.jit
def tanh(z):
    square = z * z
    curve = tl.fma(square, tl.fma(square, 0.018752313, -0.053564432), 0.13331237)
    near = tl.fma(z * square, tl.fma(square, curve, -0.33333299), z)
    far = 1 - 2 / (1 + tl.exp(2 * tl.abs(z)))
    return tl.where(square < 0.16, near, tl.where(z < 0, -far, far))


@triton.jit
def gaussian(z):
    """Return the share of a Gaussian below z, and exp(-z^2 / 2). The tail is exp(-z^2 / 2) times a polynomial in
    t = 1 / (1 + |z| / 4), fitted to a relative error of 4e-8 however thin the tail; (1 + erf) / 2 would lose it."""
    bell = tl.exp(-0.5 * z * z)
    t = 1 / (1 + 0.25 * tl.abs(z))
    tail = tl.fma(t, tl.fma(t, 0.019782082, -0.080877609), 0.095597463)
    tail = tl.fma(t, tl.fma(t, tl.fma(t, tail, -0.031717580), 0.063698848), 0.058975390)
    tail = tl.fma(t, tl.fma(t, tl.fma(t, tail, 0.081603021), 0.093466369), 0.099736431)
    tail = bell * t * tl.fma(t, tail, 0.099735567)
    return tl.where(z > 0, 1 - tail, tail), bell


@triton.jit
def bounded_square(z):
    return tl.minimum(z * z, 1e30)


@triton.jit
def formula(ACTIVATION: tl.constexpr, BACKWARD: tl.constexpr, known, dy):
    """Return y of z, or dz of dy and of what was saved (ACTIVATIONS says which). ``known`` is z or what was saved."""
    if ACTIVATION == "none":
        result = dy if BACKWARD else known
    elif ACTIVATION == "relu":
        result = tl.where(known <= 0, 0.0, dy if BACKWARD else known)  # NaN passes
    elif ACTIVATION == "relu2":
        result = tl.where(known <= 0, 0.0, 2 * known * dy if BACKWARD else known * known)
    elif ACTIVATION == "gelu":
        share, bell = gaussian(known)
        result = dy * (share + known * (bell * DENSITY)) if BACKWARD else known * share
    elif ACTIVATION == "gelu_tanh":
        square = bounded_square(known)
        if BACKWARD:
            s, one_minus_s = logistic(known * (LINEAR + CUBIC * square))
            result = dy * (s + known * s * one_minus_s * (LINEAR + 3 * CUBIC * square))
        else:
            result = known * sigmoid(known * (LINEAR + CUBIC * square))
    elif ACTIVATION == "silu":
        if BACKWARD:
            s, one_minus_s = logistic(known)
            result = dy * (s * (1 + known * one_minus_s))
        else:
            result = known * sigmoid(known)
    elif ACTIVATION == "sigmoid":
        result = dy * known * (1 - known) if BACKWARD else sigmoid(known)
    else:
        tl.static_assert(ACTIVATION == "tanh")
        result = dy * (1 - known * known) if BACKWARD else tanh(known)
    return result


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
    return formula(ACTIVATION, False, z, z)


@triton.jit
def activate_backward(dy, saved, ACTIVATION: tl.constexpr):
    return formula(ACTIVATION, True, saved, dy)
