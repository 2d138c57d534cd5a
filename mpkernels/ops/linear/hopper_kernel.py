"""linear_act's product for Hopper: programs that stay, and copy blocks in while they multiply and finish others."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from contextvars import copy_context

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpkernels.ops.linear import tiling
from mpkernels.ops.linear.activations_kernel import activate
from mpkernels.ops.linear.product_kernel import add_bias, multiply_add, tile_of


@triton.jit(do_not_specialize=["M"])
def linear_act_persistent_kernel(
    x, weight, bias, y, z, M, N, K, x_row, weight_row, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    x_blocks = tl.make_tensor_descriptor(x, [M, K], [x_row, 1], [BLOCK_M, BLOCK_K])
    weight_blocks = tl.make_tensor_descriptor(weight, [N, K], [weight_row, 1], [BLOCK_N, BLOCK_K])
    y_blocks = tl.make_tensor_descriptor(y, [M, N], [N, 1], [BLOCK_M, BLOCK_N])
    if z is not None:
        z_blocks = tl.make_tensor_descriptor(z, [M, N], [N, 1], [BLOCK_M, BLOCK_N])
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    # Triton 3.6 to 3.9 wait for every wgmma before they release a buffer: the gate follows this loop's PTX.
    for number in tl.range(tl.program_id(0), tiles, tl.num_programs(0), warp_specialize=True):
        tile_m, tile_n = tile_of(number, M, N, BLOCK_M, BLOCK_N)
        row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for begin in range(0, K, BLOCK_K):
            total = multiply_add(x_blocks.load([row, begin]), weight_blocks.load([column, begin]).T, total, "ieee")
        total = add_bias(total, bias, column + tl.arange(0, BLOCK_N), N)
        if z is not None:
            z_blocks.store([row, column], total.to(z.dtype.element_ty))
        y_blocks.store([row, column], activate(total, ACTIVATION).to(y.dtype.element_ty))


def takes(x: Tensor, weight: Tensor) -> bool:
    """Return whether the chip can copy blocks of all three matrices: rows of whole 16 bytes, y's too (triton#11583)."""
    return x.dtype != torch.float32 and len(weight) % 8 == 0 and _is_copied_by_block(x) and _is_copied_by_block(weight)


def _is_copied_by_block(matrix: Tensor) -> bool:
    row, column = matrix.stride()
    aligned = column == 1 and row % 8 == 0 and matrix.data_ptr() % 16 == 0
    return aligned and row >= matrix.shape[1] > 1  # Triton makes a constant of a 1, and no loop to specialise warps in


def launch(x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, z: Tensor | None, activation: str) -> None:
    (rows, columns), depth = y.shape, x.shape[1]
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2
    tile = tiling.persistent_tile(activation, rows, columns, processors)
    programs = min(processors, tile.cover(rows, columns))

    def run() -> None:
        triton.set_allocator(lambda size, alignment, stream: x.new_empty(size, dtype=torch.int8))
        linear_act_persistent_kernel[(programs,)](
            x, weight, bias, y, z, rows, columns, depth, x.stride(0), weight.stride(0),
            ACTIVATION=activation, **tile._asdict(), enable_fp_fusion=False,
        )  # fmt: skip

    copy_context().run(run)  # the allocator, where descriptors lie, may be another's here
