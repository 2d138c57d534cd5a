"""Products of linear layers that are finished in registers: by bias, activation and gate, or by slopes, h and sums.

Blocks of matrices come and go by descriptors: TMA moves them where the chip has it. The activations' formulas are those
of activations.py, in fp32, without a library that the interpreter lacks.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from math import e, log2, pi, sqrt

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from mpkernels.ops.linear import activations

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
GROUP, PART = tl.constexpr(8), tl.constexpr(32)
LINEAR, CUBIC = tl.constexpr(activations.LINEAR), tl.constexpr(activations.CUBIC)
LOG2_E, DENSITY = tl.constexpr(log2(e)), tl.constexpr(1 / sqrt(2 * pi))  # the density is a Gaussian's at 0


@triton.jit
def reciprocal(x):
    """Return 1 / x, off by 1 ulp at most. In Triton the division is eight instructions, off by 2 ulp."""
    if INTERPRETED or not is_cuda():
        return 1 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def logistic(z):
    """Return sigmoid(z) and sigmoid(-z), equally accurate; for large z, 1 - sigmoid(z) would cancel."""
    power = tl.exp2(z * -LOG2_E)
    s = reciprocal(1 + power)
    return s, tl.where(z > 0, power * s, 1 - s)


@triton.jit
def tanh(z):
    square = z * z
    curve = tl.fma(square, tl.fma(square, 0.018752313, -0.053564432), 0.13331237)
    near = tl.fma(z * square, tl.fma(square, curve, -0.33333299), z)
    far = 1 - 2 * reciprocal(1 + tl.exp2(tl.abs(z) * (2 * LOG2_E)))
    return tl.where(square < 0.16, near, tl.where(z < 0, -far, far))


@triton.jit
def gaussian(z):
    """Return the share of a Gaussian below z, and exp(-z^2 / 2). The tail is exp(-z^2 / 2) times a polynomial in
    t = 1 / (1 + |z| / 4), fitted to a relative error of 4e-8 however thin the tail; (1 + erf) / 2 would lose it."""
    bell = tl.exp2(z * z * (-0.5 * LOG2_E))
    t = reciprocal(tl.fma(tl.abs(z), 0.25, 1.0))
    tail = tl.fma(t, tl.fma(t, 0.019782082, -0.080877609), 0.095597463)
    tail = tl.fma(t, tl.fma(t, tl.fma(t, tail, -0.031717580), 0.063698848), 0.058975390)
    tail = tl.fma(t, tl.fma(t, tl.fma(t, tail, 0.081603021), 0.093466369), 0.099736431)
    tail = bell * t * tl.fma(t, tail, 0.099735567)
    return tl.where(z > 0, 1 - tail, tail), bell


@triton.jit
def activate(known, dy, ACTIVATION: tl.constexpr, KNOWS_Y: tl.constexpr):
    """Return y = f(z) and dy f'(z), where z is known or, with KNOWS_Y, y. NaN passes. What nobody uses, the compiler
    leaves out."""
    y, dz = known, dy
    if ACTIVATION == "relu":
        y, dz = tl.where(known <= 0, 0.0, known), tl.where(known <= 0, 0.0, dy)
    elif ACTIVATION == "relu2":
        y, dz = tl.where(known <= 0, 0.0, known * known), tl.where(known <= 0, 0.0, 2 * known * dy)
    elif ACTIVATION == "gelu":
        share, bell = gaussian(known)
        y, dz = known * share, dy * tl.fma(known, bell * DENSITY, share)
    elif ACTIVATION == "gelu_tanh":
        square = tl.minimum(known * known, 1e30)  # else inf times the 0 of a saturated sigmoid would be NaN
        s, one_minus_s = logistic(known * tl.fma(square, CUBIC, LINEAR))
        y = known * s
        dz = dy * tl.fma(y * one_minus_s, tl.fma(square, 3 * CUBIC, LINEAR), s)
    elif ACTIVATION == "silu":
        s, one_minus_s = logistic(known)
        y, dz = known * s, dy * (s * tl.fma(known, one_minus_s, 1.0))
    elif ACTIVATION == "sigmoid":
        y = known if KNOWS_Y else logistic(known)[0]
        dz = dy * (y * (1 - y))
    elif ACTIVATION == "tanh":
        y = known if KNOWS_Y else tanh(known)
        dz = dy * (1 - y * y)
    else:
        tl.static_assert(ACTIVATION == "none")
    return y, dz


@triton.jit
def laid_out_like(value, other):
    """Return value. Without this, the compiler computes the activation once for each of two layouts."""
    if INTERPRETED or not is_cuda():
        return value
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f,f", [value, other], tl.float32, is_pure=True, pack=1)


@triton.jit
def corner(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the first row and column of this program's tile. Programs that run at once get tiles in a few rows, and
    read the same weights."""
    number, width = tl.program_id(0), GROUP * tl.cdiv(N, BLOCK_N)
    first = number // width * GROUP
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - first, GROUP)
    return (first + number % width % height) * BLOCK_M, number % width // height * BLOCK_N


@triton.jit
def parts_of(tile):
    """Return blocks of PART columns, which are finished one after the other, in fewer registers."""
    if tile.shape[1] > PART:
        left, right = tl.split(tl.reshape(tile, (tile.shape[0], 2, tile.shape[1] // 2)).permute(0, 2, 1))
        parts = parts_of(left) + parts_of(right)
    else:
        parts = (tile,)
    return parts


@triton.jit
def multiply_add(part, weight, column, begin, total, K_FIRST: tl.constexpr, PRECISION: tl.constexpr):
    block = weight.load([begin, column]) if K_FIRST else weight.load([column, begin]).T
    if INTERPRETED:  # the interpreter keeps bf16 as integers, and would multiply those
        part, block = part.to(tl.float32), block.to(tl.float32)
    return tl.dot(part, block, total, input_precision=PRECISION)


@triton.jit
def multiply(
    x, weight, up_weight, row, column, K, K_FIRST: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the parts of tiles of x's products with both weights, [N, K] or, with K_FIRST, [K, N]."""
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in range(0, K, BLOCK_K):
        part = x.load([row, begin])
        total = multiply_add(part, weight, column, begin, total, K_FIRST, PRECISION)
        if up_weight is not None:
            up = multiply_add(part, up_weight, column, begin, up, K_FIRST, PRECISION)
    return parts_of(total), parts_of(up)


@triton.jit
def add_bias(total, bias, column, N):
    if bias is not None:
        columns = column + tl.arange(0, PART)
        total += tl.load(bias + columns, mask=columns < N, other=0).to(tl.float32)[None, :]
    return total


@triton.jit(do_not_specialize=["M", "N", "K"])
def linear_act_kernel(
    x, weight, up_weight, bias, up_bias, y, z, z_up, M, N, K,
    ACTIVATION: tl.constexpr, K_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr = "ieee",
):  # fmt: skip
    """Compute a tile of y, [M, N], and of z or of its halves, z and z_up. K is what the products sum over."""
    row, first = corner(M, N, BLOCK_M, BLOCK_N)
    totals, ups = multiply(x, weight, up_weight, row, first, K, K_FIRST, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K)
    for i in tl.static_range(BLOCK_N // PART):
        column = first + i * PART
        total = add_bias(totals[i], bias, column, N)
        if z is not None:
            z.store([row, column], total.to(z.dtype))
        value, _ = activate(total, total, ACTIVATION, False)
        if up_weight is not None:
            up = add_bias(ups[i], up_bias, column, N)
            value *= up
            if z_up is not None:
                z_up.store([row, column], up.to(z_up.dtype))
        y.store([row, column], value.to(y.dtype))


@triton.jit(do_not_specialize=["M", "N", "K"])
def linear_dact_kernel(
    dy, weight, saved, up, dz, dup, h, sums, M, N, K,
    ACTIVATION: tl.constexpr, KNOWS_Y: tl.constexpr, K_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr = "ieee",
):  # fmt: skip
    """Compute a tile of dz, [M, N], and of dup, the gradient of a gate's other factor; of h; and the sums of dz's
    columns over the tile's rows. Without a weight, dy is the product."""
    row, first = corner(M, N, BLOCK_M, BLOCK_N)
    if weight is not None:
        grads, _ = multiply(dy, weight, None, row, first, K, K_FIRST, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K)
    else:
        grads = parts_of(dy.load([row, first]).to(tl.float32))
    for i in tl.static_range(BLOCK_N // PART):
        column, grad = first + i * PART, grads[i]
        if saved is not None:
            known, dh = laid_out_like(saved.load([row, column]).to(tl.float32), grad), grad
            if up is not None:
                factor = laid_out_like(up.load([row, column]).to(tl.float32), grad)
                grad *= factor
            value, grad = activate(known, grad, ACTIVATION, KNOWS_Y)
            if up is not None:
                dup.store([row, column], (dh * value).to(dup.dtype))
                value *= factor
            if h is not None:
                h.store([row, column], value.to(h.dtype))
        if dz is not None:
            dz.store([row, column], grad.to(dz.dtype))
        if sums is not None:
            inside = row + tl.arange(0, BLOCK_M) < M  # beyond the last row, a weight that is inf makes NaN of 0
            columns, tile = column + tl.arange(0, PART), (row // BLOCK_M).to(tl.int64)
            tl.store(sums + tile * N + columns, tl.sum(tl.where(inside[:, None], grad, 0.0), 0), mask=columns < N)
