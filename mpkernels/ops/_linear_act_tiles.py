"""How much of a matrix product one Triton program takes: by chip and kind of operands, to be tuned on each."""

from typing import NamedTuple

import torch
import triton


class Tile(NamedTuple):
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    num_stages: int
    num_warps: int


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
    "sm_100": {
        "16 bits": Tile(128, 128, 64, 4, 8),
        "16 bits, few rows": Tile(64, 64, 128, 4, 4),
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
# Of programs that stay. Triton specialises their warps only if there are 4 and BLOCK_M is 128.
WIDE = Tile(128, 256, 64, 3, 4)
NARROW = Tile(128, 128, 64, 4, 4)


def chip() -> str:
    """The key in TILES of the chip at hand, or of one that has no more shared memory."""
    if triton.knobs.runtime.interpret:
        return "sm_80"
    target = triton.runtime.driver.active.get_current_target()
    if target.backend == "hip":
        return "gfx942"
    return {9: "sm_90", 10: "sm_100"}.get(target.arch // 10, "sm_80")


def tile(chip: str, dtype: torch.dtype, precision: str, rows: int) -> Tile:
    if dtype == torch.float32:
        return TILES[chip]["tf32" if precision == "tf32" else "fp32"]
    return TILES[chip]["16 bits, few rows" if rows <= FEW_ROWS else "16 bits"]


def persistent_tile(activation: str, rows: int, columns: int, processors: int) -> Tile:
    fills = triton.cdiv(rows, WIDE.BLOCK_M) * triton.cdiv(columns, WIDE.BLOCK_N) >= processors
    return WIDE if fills and activation != "gelu" else NARROW  # erf's registers spill in the wide one
