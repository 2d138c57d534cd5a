"""What a GPU would take, counted: bytes over its bandwidth, flops over its matrix units, and its launches.

A prediction, to be read beside measurements or, where no such GPU was at hand, instead of them. It knows nothing of
caches, ragged edges and clocks, and gives both sides the same efficiency.
"""

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import torch

from mpkernels.bench.steps import bytes_of_our_step, bytes_of_torchs_step

# Of what a data sheet promises an H200 gives so much: a copy 4.3 of 4.8 TB/s, a matrix product in bf16 790 of 989
# TFLOP/s. The other chips are taken to be as good.
COPY_EFFICIENCY, GEMM_EFFICIENCY = 4.3 / 4.8, 790 / 989

# From the end of one small kernel to the end of the next in the same stream. In no data sheet: the shortest take 3 us.
LAUNCH = 3e-6


class Gpu(NamedTuple):
    bandwidth: float  # bytes a second
    bf16: float  # flops a second, dense, accumulated in fp32


GPUS = {
    # NVIDIA H200 data sheet, SXM: 4.8 TB/s; 1,979 TFLOP/s with sparsity, half of it without.
    "H200": Gpu(4.8e12, 989e12),
    # NVIDIA H100 data sheet, SXM: 3.35 TB/s; 1,979 TFLOP/s with sparsity.
    "H100": Gpu(3.35e12, 989e12),
    # NVIDIA A100 data sheet, 80 GB SXM: 2,039 GB/s; 312 TFLOP/s.
    "A100": Gpu(2.039e12, 312e12),
    # NVIDIA Ada GPU architecture white paper, appendix on the RTX 4090: 1,008 GB/s; 165.2 TFLOP/s with fp32 accumulate.
    "RTX 4090": Gpu(1.008e12, 165.2e12),
    # AMD Instinct MI300X data sheet: 5.3 TB/s; 1,307.4 TFLOP/s.
    "MI300X": Gpu(5.3e12, 1307.4e12),
}


class Work(NamedTuple):
    moved: float  # bytes, outside of matrix products
    flops: float = 0.0
    launches: int = 0

    def seconds(self, gpu: Gpu) -> float:
        """Launches hide behind the kernels before them, unless these are too short."""
        computed = self.flops / (GEMM_EFFICIENCY * gpu.bf16)
        return max(self.moved / (COPY_EFFICIENCY * gpu.bandwidth) + computed, self.launches * LAUNCH)


def find(name: str) -> Gpu | None:
    """By what a driver calls it: "NVIDIA H200", say."""
    return next((gpu for known, gpu in GPUS.items() if known in name), None)


def our_step(sizes: Sequence[int], grads: torch.dtype, state_dtype: torch.dtype = torch.float32) -> Work:
    """grad_stats and adamw_, a launch each; update_scale_; outcome's zeros, and three small ones around the scale."""
    return Work(bytes_of_our_step(grads, state_dtype) * sum(sizes), launches=2 + 1 + 4)


# ATen's MultiTensorApply.cuh: a launch of a foreach op takes so many tensors in lists of so many, and 320 blocks of
# 65536 elements.
MOST_TENSORS = {1: 110, 4: 36}
MOST_ELEMENTS = 320 * 65536


def foreach_launches(sizes: Sequence[int], lists: int) -> int:
    return max(ceil(len(sizes) / MOST_TENSORS[lists]), ceil(sum(sizes) / MOST_ELEMENTS))


def torchs_step(sizes: Sequence[int]) -> Work:
    """torch.amp with its fused AdamW on fp32 parameters: unscale_, norms, clipping and the counts of steps take a list
    each, the update four. Around them: the inverse scale, found_inf, the norm of norms, the coefficient, the scale."""
    around = 4 + 2 + 3 + 3 + 1
    launches = 4 * foreach_launches(sizes, 1) + foreach_launches(sizes, 4) + around
    return Work(bytes_of_torchs_step() * sum(sizes), launches=launches)


def our_linear_act(rows: int, inputs: int, outputs: int) -> Work:
    """Forward: weight and bias are cast, one kernel multiplies and writes y beside z. Backward: dz from dy and z, with
    the bias's grad; then dx, and dw in fp32. What a matrix product reads, and the 2 bytes it writes, come with it."""
    hidden, weights = rows * outputs, inputs * outputs
    moved = 2 * hidden + 6 * hidden + 6 * weights + 2 * weights
    return Work(moved, 6 * rows * weights, launches=2 + 1 + 2 + 2)


def torchs_linear_act(rows: int, inputs: int, outputs: int) -> Work:
    """torch.amp eager. Forward: the casts, z, then y from z. Backward: dz from dy and z, dx, dw, the bias's grad from
    dz; the grads of weight and bias are cast to fp32."""
    hidden, weights = rows * outputs, inputs * outputs
    moved = 4 * hidden + 6 * hidden + 2 * hidden + 6 * weights + 6 * weights
    return Work(moved, 6 * rows * weights, launches=2 + 2 + 1 + 2 + 1 + 2)


def ratio(gpu: Gpu, ours: Work, theirs: Work) -> float:
    return theirs.seconds(gpu) / ours.seconds(gpu)
