"""linear_gated in Triton: two products at once, whose bias, activation and gate never leave registers; and
linear_dgated: a product that takes both slopes, or one pass where there is no product."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from mpkernels.ops._registry import implement
from mpkernels.ops.linear import tiling
from mpkernels.ops.linear.activations import ACTIVATIONS
from mpkernels.ops.linear.activations_kernel import activate, activate_backward
from mpkernels.ops.linear.linear_gated import _linear_dgated, _linear_gated
from mpkernels.ops.linear.product_kernel import (
    add_bias,
    chip,
    multiply,
    multiply_add,
    precision,
    refuse_fp64,
    tile_of,
)

PASS = tiling.Tile(16, 128, 16, 1, 4)  # for linear_dgated without a product


@triton.jit
def linear_gated_kernel(
    x, gate_weight, up_weight, gate_bias, up_bias, h, z, M, N, K,
    x_row, x_column, gate_row, gate_column, up_row, up_column,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)
    depth = tl.arange(0, BLOCK_K)
    x_block = x + rows[:, None] * x_row + depth.to(tl.int64)[None, :] * x_column
    gate_block = gate_weight + columns[None, :] * gate_row + depth.to(tl.int64)[:, None] * gate_column
    up_block = up_weight + columns[None, :] * up_row + depth.to(tl.int64)[:, None] * up_column
    step = tl.full([], BLOCK_K, tl.int64)
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in range(0, K, BLOCK_K):
        left = depth < K - begin
        there = (columns < N)[None, :] & left[:, None]
        x_part = tl.load(x_block, mask=(rows < M)[:, None] & left[None, :], other=0)
        gate = multiply_add(x_part, tl.load(gate_block, mask=there, other=0), gate, PRECISION)
        up = multiply_add(x_part, tl.load(up_block, mask=there, other=0), up, PRECISION)
        x_block += step * x_column
        gate_block += step * gate_column
        up_block += step * up_column
    gate = add_bias(gate, gate_bias, columns, N)
    up = add_bias(up, up_bias, columns, N)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    if z is not None:
        at = rows[:, None] * (2 * N) + columns[None, :]
        tl.store(z + at, gate.to(z.dtype.element_ty), mask=inside)
        tl.store(z + at + N, up.to(z.dtype.element_ty), mask=inside)
    value = activate(gate, ACTIVATION) * up
    tl.store(h + rows[:, None] * N + columns[None, :], value.to(h.dtype.element_ty), mask=inside)


@triton.jit
def linear_dgated_kernel(
    dy, weight, z, dz, h, M, N, K, dy_row, dy_column, weight_row, weight_column, z_row, z_column,
    ACTIVATION: tl.constexpr, SAVES_Y: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute a tile of h, [M, N], and of both halves of dz. K is what the product sums over."""
    tile_m, tile_n = tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    if weight is not None:
        dh = multiply(
            dy, weight, rows, columns, M, N, K, dy_row, dy_column, weight_row, weight_column, PRECISION, BLOCK_K
        )  # fmt: skip
    else:
        at = rows[:, None] * dy_row + columns[None, :] * dy_column
        dh = tl.load(dy + at, mask=inside, other=0).to(tl.float32)
    at = rows[:, None] * z_row + columns[None, :] * z_column
    to = rows[:, None] * (2 * N) + columns[None, :]
    gate = tl.load(z + at, mask=inside, other=0).to(tl.float32)
    opened = activate(gate, ACTIVATION)
    tl.store(dz + to + N, (dh * opened).to(dz.dtype.element_ty), mask=inside)
    # up is loaded behind a store, past which no load is moved, so that registers hold one of both at a time.
    up = tl.load(z + at + z_column * N, mask=inside, other=0).to(tl.float32)
    if h is not None:
        tl.store(h + rows[:, None] * N + columns[None, :], (opened * up).to(h.dtype.element_ty), mask=inside)
    dgate = activate_backward(dh * up, opened if SAVES_Y else gate, ACTIVATION)
    tl.store(dz + to, dgate.to(dz.dtype.element_ty), mask=inside)


@implement(_linear_gated)
def linear_gated_triton(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    activation: str,
    save: bool,
) -> tuple[Tensor, Tensor]:
    refuse_fp64("linear_gated", x)
    (rows, depth), columns = x.shape, len(gate_weight)
    h = x.new_empty(rows, columns)
    z = x.new_empty(rows, 2 * columns) if save else x.new_empty(0)
    if h.numel():
        gate_bias, up_bias = (None if it is None else it.contiguous() for it in (gate_bias, up_bias))
        tile = tiling.gated_tile(chip(), x, gate_weight, up_weight, precision())
        linear_gated_kernel[(tile.cover(rows, columns),)](
            x, gate_weight, up_weight, gate_bias, up_bias, h, z if save else None, rows, columns, depth,
            *x.stride(), *gate_weight.stride(), *up_weight.stride(),
            ACTIVATION=activation, PRECISION=precision(), **tile._asdict(), enable_fp_fusion=False,
        )  # fmt: skip
    return h, z


@implement(_linear_dgated)
def linear_dgated_triton(
    dy: Tensor, weight: Tensor | None, z: Tensor, activation: str, wants_h: bool
) -> tuple[Tensor, Tensor]:
    refuse_fp64("linear_dgated", dy)
    rows, columns = len(z), z.shape[1] // 2
    dz = z.new_empty(rows, 2 * columns)
    h = z.new_empty(rows, columns) if wants_h else z.new_empty(0)
    if dz.numel():
        tile = PASS if weight is None else tiling.dgated_tile(chip(), dy, weight, z, activation, precision())
        linear_dgated_kernel[(tile.cover(rows, columns),)](
            dy, weight, z, dz, h if wants_h else None, rows, columns, dy.shape[1],
            *dy.stride(), *((0, 0) if weight is None else weight.stride()), *z.stride(),
            ACTIVATION=activation, SAVES_Y=ACTIVATIONS[activation].saves == "y", PRECISION=precision(),
            **tile._asdict(), enable_fp_fusion=False,
        )  # fmt: skip
    return dz, h
