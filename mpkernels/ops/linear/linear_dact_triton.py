"""linear_dact in Triton: a product that is multiplied by the slope, and summed up by columns, in registers."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpkernels.ops._registry import implement
from mpkernels.ops.linear import tiling
from mpkernels.ops.linear.activations import ACTIVATIONS
from mpkernels.ops.linear.activations_kernel import activate, activate_backward
from mpkernels.ops.linear.linear_dact import _linear_dact
from mpkernels.ops.linear.product_kernel import chip, multiply, precision, refuse_fp64, tile_of


@triton.jit
def linear_dact_kernel(
    dy, weight, saved, dz, sums, h, M, N, K,
    dy_row, dy_column, weight_row, weight_column, saved_row, saved_column,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute a tile of dz, and of h, [M, N]. K is what the product sums over."""
    tile_m, tile_n = tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)
    value = multiply(
        dy, weight, rows, columns, M, N, K, dy_row, dy_column, weight_row, weight_column, PRECISION, BLOCK_K
    )  # fmt: skip
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    to = rows[:, None] * N + columns[None, :]
    if saved is not None:
        at = rows[:, None] * saved_row + columns[None, :] * saved_column
        known = tl.load(saved + at, mask=inside, other=0).to(tl.float32)
        if h is not None:  # h leaves registers before the slope needs them
            tl.store(h + to, activate(known, ACTIVATION).to(h.dtype.element_ty), mask=inside)
        value = activate_backward(value, known, ACTIVATION)
    tl.store(dz + to, value.to(dz.dtype.element_ty), mask=inside)
    if sums is not None:
        known = tl.where(inside, value, 0.0)  # beyond the last row, a weight that is inf makes NaN of 0
        tl.store(sums + tile_m.to(tl.int64) * N + columns, tl.sum(known, 0), mask=columns < N)


@implement(_linear_dact)
def linear_dact_triton(
    dy: Tensor, weight: Tensor, saved: Tensor, activation: str, bias_dtype: torch.dtype | None, wants_h: bool
) -> tuple[Tensor, Tensor, Tensor]:
    refuse_fp64("linear_dact", dy)
    (rows, depth), columns = dy.shape, weight.shape[1]
    dz = dy.new_empty(rows, columns)
    saves = ACTIVATIONS[activation].saves
    has_slope, makes_h = saves != "", wants_h and saves == "z"
    h = dy.new_empty(rows, columns) if makes_h else dy.new_empty(0)
    tile = tiling.dact_tile(chip(), dy, weight, saved if has_slope else None, makes_h, precision())
    parts = triton.cdiv(rows, tile.BLOCK_M)
    sums = None if bias_dtype is None else dy.new_empty(parts, columns, dtype=torch.float32)
    if dz.numel():
        linear_dact_kernel[(tile.cover(rows, columns),)](
            dy, weight, saved if has_slope else None, dz, sums, h if makes_h else None, rows, columns, depth,
            *dy.stride(), *weight.stride(), *(saved.stride() if has_slope else (0, 0)),
            ACTIVATION=activation, PRECISION=precision(), **tile._asdict(), enable_fp_fusion=False,
        )  # fmt: skip
    return dz, dy.new_empty(0) if sums is None else sums.sum(0, dtype=torch.float64).to(bias_dtype), h
