"""The chips that times are predicted for, and where each number comes from."""

from typing import NamedTuple

from mpkernels.bench import roofline

# Assumed, of all chips: from asking memory to the answer while the chip moves all that it can. An idle chip answers
# a pointer chase in less than half of it (Luo et al., arXiv:2402.13499); what queues cost on top is not published.
LATENCY = 700e-9
# Likewise of the L2 cache, for what little a block reads that is not data.
SHORT_LATENCY = 250e-9


class Chip(NamedTuple):
    """Of one streaming multiprocessor (SM), unless it says something else. Lanes are results a cycle, from the table
    of arithmetic throughput in the CUDA C++ Programming Guide; limits are from its table of compute capabilities."""

    code: str  # the machine code it runs
    bandwidth: float  # of the chip's memory: what a copy reaches, in bytes a second
    multiprocessors: int
    clock: float  # boost: the data sheet's fp32 FLOP/s over 2 x lanes x SMs
    lanes: dict[str, int]  # by unit: of sass.counts.UNITS
    threads: int = 2048
    blocks: int = 32
    shared: int = 228 << 10  # bytes


def _bandwidth(name: str) -> float:
    return roofline.COPY_EFFICIENCY * roofline.GPUS[name].bandwidth


# fma and alu are pipes of 64 lanes each in 8.0, of 128 and 64 later; special has exp2, rcp, rsqrt and conversions.
HOPPER = {"fma": 128, "alu": 64, "fp64": 64, "special": 16, "memory": 32}
AMPERE = {"fma": 64, "alu": 64, "fp64": 32, "special": 16, "memory": 32}
ADA = {"fma": 128, "alu": 64, "fp64": 2, "special": 16, "memory": 32}

CHIPS = {
    # NVIDIA A100 data sheet: 19.5 TFLOP/s; 164 KB of shared memory.
    "A100": Chip("sm_80", _bandwidth("A100"), 108, 1.41e9, AMPERE, shared=164 << 10),
    # NVIDIA H100 and H200 data sheets, SXM: 67 TFLOP/s.
    "H100": Chip("sm_90", _bandwidth("H100"), 132, 1.98e9, HOPPER),
    "H200": Chip("sm_90", _bandwidth("H200"), 132, 1.98e9, HOPPER),
    # NVIDIA HGX B200 data sheet: 600 TFLOP/s of eight, 64 TB/s of eight.
    "B200": Chip("sm_100", roofline.COPY_EFFICIENCY * 8e12, 148, 1.98e9, HOPPER),
    # NVIDIA Ada GPU architecture white paper: 82.6 TFLOP/s. It runs what is compiled for 8.0.
    "RTX 4090": Chip("sm_80", _bandwidth("RTX 4090"), 128, 2.52e9, ADA, 1536, 24, 100 << 10),
}
ISSUED = 4 * 32  # lanes of instructions that an SM issues a cycle, of any unit
REGISTERS = 65536
CODES = sorted({chip.code for chip in CHIPS.values()})
