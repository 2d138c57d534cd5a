"""The ops of linear layers in Triton: two kernels, and torch's products for the gradients of weights and of x.

TMA takes matrices whose rows begin at multiples of 16 bytes. Of others the kernels get copies, with rows filled up.
"""

from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mpkernels.ops._autocast import without_autocast
from mpkernels.ops._registry import implement
from mpkernels.ops.linear.activations import ACTIVATIONS
from mpkernels.ops.linear.linear_act import _linear_act, _linear_act_backward
from mpkernels.ops.linear.linear_dact import _linear_dact
from mpkernels.ops.linear.linear_gated import _linear_dgated, _linear_gated
from mpkernels.ops.linear.linear_kernel import PART, linear_act_kernel, linear_dact_kernel
from mpkernels.ops.linear.tf32 import uses_tf32

# What a program computes, and with what. Two LARGE ones fit on a Hopper's processor: one multiplies while the other
# finishes. On sm_100, ptxas left to itself makes room for a third one, and spills.
Tile = dict[str, Any]
LARGE: Tile = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_stages": 3, "num_warps": 4}
SMALL: Tile = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 16, "num_stages": 2, "num_warps": 8}


def tile_for(dtype: torch.dtype) -> Tile:
    if dtype == torch.float32:
        return SMALL | {"PRECISION": "tf32" if uses_tf32() else "ieee"}
    if triton.knobs.runtime.interpret:
        return SMALL
    target = triton.runtime.driver.active.get_current_target()
    generation = target.arch // 10 if target.backend == "cuda" else 0
    return {9: LARGE, 10: LARGE | {"maxnreg": 255}}.get(generation, SMALL)


def _grid(rows: int, columns: int, tile: Tile) -> tuple[int]:
    return (triton.cdiv(rows, tile["BLOCK_M"]) * triton.cdiv(columns, tile["BLOCK_N"]),)


def _filled_up(columns: int, like: Tensor) -> int:
    """Return the number of columns that fill whole 16 bytes."""
    each = 16 // like.element_size()
    return -(-columns // each) * each


def _blocks(matrix: Tensor | None, rows: int, columns: int, is_turned: bool = False) -> TensorDescriptor | None:
    """Return a descriptor of blocks of a matrix or, with ``is_turned``, of its transpose; of a copy, if need be."""
    if matrix is None:
        return None
    if is_turned:
        matrix, rows, columns = matrix.t(), columns, rows
    (height, width), (stride, step) = matrix.shape, matrix.stride()
    if not matrix.numel():  # nothing is loaded, but a descriptor must have elements
        matrix = matrix.new_empty(1, _filled_up(1, matrix))
    elif step != 1 or stride < width or stride != _filled_up(stride, matrix) or matrix.data_ptr() % 16:
        matrix = matrix.new_empty(height, _filled_up(width, matrix))[:, :width].copy_(matrix)
    return TensorDescriptor.from_tensor(matrix, [rows, columns])


def _parts(matrices: Tensor, width: int, tile: Tile) -> list[TensorDescriptor | None]:
    """Return descriptors of one matrix and of another beside it; None for each that isn't there."""
    each = matrices.split(width, 1) if matrices.numel() else ()
    return [*(_blocks(it, tile["BLOCK_M"], PART.value) for it in each), None, None][:2]


class _Result:
    """A matrix to be computed, two side by side, or none. TMA stores whole 16 bytes, beyond the last column too."""

    def __init__(self, like: Tensor, rows: int, columns: int, count: int = 1) -> None:
        self.columns, self.width = columns, _filled_up(columns, like)
        self.memory = like.new_empty(rows, count * self.width) if count else like.new_empty(0)

    def parts(self, tile: Tile) -> list[TensorDescriptor | None]:
        return _parts(self.memory, self.width, tile)

    def value(self) -> Tensor:
        if self.memory.dim() == 1 or self.width == self.columns:
            return self.memory
        with without_autocast(self.memory):
            return torch.cat([it[:, : self.columns] for it in self.memory.split(self.width, 1)], 1)


def _refuse_fp64(op: str, tensor: Tensor) -> None:
    if tensor.dtype == torch.float64:
        raise TypeError(f"{op}: the Triton kernel takes fp16, bf16 and fp32, got {tensor.dtype}")


@implement(_linear_act)
def linear_act_triton(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save: bool
) -> tuple[Tensor, Tensor]:
    _refuse_fp64("linear_act", x)
    return _forward(x, weight, None, bias, None, activation, int(save and ACTIVATIONS[activation].saves == "z"))


@implement(_linear_gated)
def linear_gated_triton(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor, gate_bias: Any, up_bias: Any, activation: str, save: bool
) -> tuple[Tensor, Tensor]:
    _refuse_fp64("linear_gated", x)
    return _forward(x, gate_weight, up_weight, gate_bias, up_bias, activation, 2 * save)


def _forward(
    x: Tensor, weight: Tensor, up_weight: Any, bias: Any, up_bias: Any, activation: str, saved: int
) -> tuple[Tensor, Tensor]:
    """Return y, and z, the number of whose matrices is ``saved``."""
    (rows, depth), columns, tile = x.shape, len(weight), tile_for(x.dtype)
    if up_weight is not None:  # a program holds two numbers per element
        tile = tile | {"BLOCK_N": tile["BLOCK_N"] // 2}
    y, z = _Result(x, rows, columns), _Result(x, rows, columns, saved)
    if rows and columns:
        k_first = weight.stride(1) != 1
        linear_act_kernel[_grid(rows, columns, tile)](
            _blocks(x, tile["BLOCK_M"], tile["BLOCK_K"]),
            *(_blocks(it, tile["BLOCK_N"], tile["BLOCK_K"], k_first) for it in (weight, up_weight)),
            *(None if it is None else it.contiguous() for it in (bias, up_bias)),
            y.parts(tile)[0], *z.parts(tile), rows, columns, depth,
            ACTIVATION=activation, K_FIRST=k_first, **tile, enable_fp_fusion=False,
        )  # fmt: skip
    return y.value(), z.value()


@implement(_linear_dact)
def linear_dact_triton(
    dy: Tensor, weight: Tensor | None, saved: Tensor, activation: str, bias_dtype: torch.dtype | None, wants_h: bool
) -> tuple[Tensor, Tensor, Tensor]:
    _refuse_fp64("linear_dact", dy)
    makes_h = wants_h and ACTIVATIONS[activation].saves == "z"
    dz, h, dbias = _backward(dy, weight, saved, activation, 1, makes_h, bias_dtype)
    return dz, dbias, h


@implement(_linear_dgated)
def linear_dgated_triton(
    dy: Tensor, weight: Tensor | None, z: Tensor, activation: str, wants_h: bool
) -> tuple[Tensor, Tensor]:
    _refuse_fp64("linear_dgated", dy)
    return _backward(dy, weight, z, activation, 2, wants_h, None)[:2]


def _backward(
    dy: Tensor, weight: Tensor | None, saved: Tensor, activation: str, count: int, makes_h: bool, bias_dtype: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dz, which has ``count`` matrices, h, and the sums of dz's columns. Without a weight, dy is the product."""
    (rows, depth), tile = dy.shape, SMALL if weight is None else tile_for(dy.dtype)
    columns, saves = depth if weight is None else weight.shape[1], ACTIVATIONS[activation].saves
    dz, h = _Result(dy, rows, columns, count), _Result(dy, rows, columns, int(makes_h))
    parts = 0 if bias_dtype is None else triton.cdiv(rows, tile["BLOCK_M"])
    sums = dy.new_empty(parts, columns, dtype=torch.float32)
    if rows and columns and (count or parts):
        k_first, knows_y = weight is not None and weight.stride(0) != 1, count < 2 and saves == "y"
        linear_dact_kernel[_grid(rows, columns, tile)](
            _blocks(dy, tile["BLOCK_M"], tile["BLOCK_N" if weight is None else "BLOCK_K"]),
            _blocks(weight, tile["BLOCK_K"], tile["BLOCK_N"], not k_first),
            *_parts(saved, columns, tile), *dz.parts(tile), h.parts(tile)[0], sums if parts else None,
            rows, columns, depth, ACTIVATION=activation, KNOWS_Y=knows_y, K_FIRST=k_first,
            **tile, enable_fp_fusion=False,
        )  # fmt: skip
    dbias = dy.new_empty(0) if bias_dtype is None else sums.sum(0, dtype=torch.float64).to(bias_dtype)
    return dz.value(), h.value(), dbias


@implement(_linear_act_backward)
def linear_act_backward_triton(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    saved: Tensor,
    activation: str,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    by_columns: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    _refuse_fp64("linear_act_backward", dy)
    makes_dz = ACTIVATIONS[activation].saves != "" and (weight is not None or weight_dtype is not None)
    dz, dx, dbias = _backward(dy, None, saved, activation, int(makes_dz), False, bias_dtype)
    dz, dweight = dz if makes_dz else dy, dy.new_empty(0)
    with without_autocast(dy):
        if weight is not None:
            dx = torch.mm(dz, weight)
        if weight_dtype is not None and x is not None:
            dweight = _mm(x.t(), dz, weight_dtype).t() if by_columns else _mm(dz.t(), x, weight_dtype)
    return dx, dweight, dbias


def _mm(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == a.dtype:
        return torch.mm(a, b)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a.to(dtype), b.to(dtype))
