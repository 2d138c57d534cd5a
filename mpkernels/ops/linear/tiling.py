"""How much of a matrix product one Triton program takes: by chip and kind of operands, to be tuned on each."""

from typing import NamedTuple

import torch
from torch import Tensor


class Tile(NamedTuple):
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    num_stages: int
    num_warps: int

    def cover(self, rows: int, columns: int) -> int:
        """Count the tiles that cover a matrix."""
        return -(-rows // self.BLOCK_M) * -(-columns // self.BLOCK_N)


FEW_ROWS = 64
TILES = {
    "sm_80": {
        "16 bits": Tile(128, 128, 32, 4, 8),
        "16 bits, few rows": Tile(64, 64, 64, 4, 4),
        "tf32": Tile(128, 64, 32, 3, 4),
        "fp32": Tile(64, 64, 16, 3, 4),
    },
    "sm_90": {
        "16 bits": Tile(128, 128, 64, 4, 8),
        "16 bits, few rows": Tile(64, 32, 128, 4, 4),
        "tf32": Tile(128, 128, 32, 4, 8),
        "fp32": Tile(64, 64, 16, 3, 4),
    },
    "gfx942": {
        "16 bits": Tile(128, 128, 64, 2, 8),
        "16 bits, few rows": Tile(64, 64, 64, 2, 4),
        "tf32": Tile(64, 64, 32, 2, 4),
        "fp32": Tile(64, 64, 32, 2, 4),
    },
}
TILES["sm_100"] = TILES["sm_90"] | {"16 bits, few rows": Tile(64, 64, 128, 4, 4)}
# sm_120 has no more shared memory than 8.9, and two products at once spilled registers in sm_80's tile.
TILES["sm_120"] = TILES["sm_80"] | {"16 bits": Tile(128, 64, 32, 4, 8)}
UNEVEN = Tile(64, 64, 32, 2, 4)  # elements are loaded one by one, and their addresses take many registers


def tile(chip: str, x: Tensor, weight: Tensor, precision: str) -> Tile:
    if x.dtype == torch.float32 and precision == "ieee":
        return TILES[chip]["fp32"]
    if not (_is_even(x) and _is_even(weight)):
        return UNEVEN
    if x.dtype == torch.float32:
        return TILES[chip]["tf32"]
    # Triton makes a constant of a size of 1, and 3.6 then spills in the larger tile.
    is_few = len(x) <= FEW_ROWS or len(weight) == 1
    return TILES[chip]["16 bits, few rows" if is_few else "16 bits"]


def _is_even(matrix: Tensor) -> bool:
    """Return whether Triton can tell that it may load 16 bytes at a time."""
    inner = 0 if matrix.stride(0) == 1 else 1
    sixteens = matrix.shape[inner], matrix.stride(1 - inner), matrix.data_ptr()
    return matrix.stride(inner) == 1 and all(each % 16 == 0 for each in sixteens)


def gated_tile(chip: str, x: Tensor, gate_weight: Tensor, up_weight: Tensor, precision: str) -> Tile:
    """Return the tile of two products at once, half as wide because it holds two numbers per element."""
    tiles = [tile(chip, x, weight, precision) for weight in (gate_weight, up_weight)]
    one = UNEVEN if UNEVEN in tiles else tiles[0]
    return one._replace(BLOCK_N=one.BLOCK_N // 2)


def dact_tile(chip: str, dy: Tensor, weight: Tensor, saved: Tensor | None, makes_h: bool, precision: str) -> Tile:
    """Return the tile of a product whose end holds three numbers per element, or four if one of them is h."""
    product = tile(chip, dy, weight, precision) if saved is None or saved.stride(1) == 1 else UNEVEN
    if makes_h:  # gelu spills registers in the wider tile
        product = product._replace(BLOCK_N=product.BLOCK_N // 2)
    return product


def dgated_tile(chip: str, dy: Tensor, weight: Tensor, z: Tensor, activation: str, precision: str) -> Tile:
    """Return the tile of a product whose end holds five numbers per element, where that of linear_dact holds three."""
    product = tile(chip, dy, weight, precision) if z.stride(1) == 1 else UNEVEN
    parts = 4 if chip == "sm_80" and activation == "gelu_tanh" else 2  # it spills in a wider tile
    return product._replace(BLOCK_N=max(16, product.BLOCK_N // parts))
