"""The chips that kernels are compiled for, and what each wants a kernel to ask of memory at a time."""

from typing import NamedTuple

# Assumed for all chips: the time from a load to its answer while the chip moves all that it can. An idle chip answers a
# pointer chase in less than half of it (Luo et al., arXiv:2402.13499); what queues cost on top is not published.
LATENCY = 700e-9
COPY_EFFICIENCY = 4.3 / 4.8  # measured on an H200: a copy's share of the data sheet's bandwidth


class Chip(NamedTuple):
    """Limits of one streaming multiprocessor (SM): the CUDA C++ Programming Guide's table of compute capabilities."""

    code: str  # the machine code it runs
    bandwidth: float  # the data sheet's, of the chip's memory, in bytes a second
    multiprocessors: int
    threads: int = 2048
    blocks: int = 32
    shared: int = 228 << 10  # bytes

    @property
    def in_one_latency(self) -> float:
        """Bytes that a multiprocessor's share of the bandwidth moves while a load is on its way."""
        return COPY_EFFICIENCY * self.bandwidth * LATENCY / self.multiprocessors


CHIPS = {
    "A100": Chip("sm_80", 2.039e12, 108, shared=164 << 10),
    "H100": Chip("sm_90", 3.35e12, 132),
    "H200": Chip("sm_90", 4.8e12, 132),
}
REGISTERS = 65536  # of an SM
CODES = ["sm_100", "sm_80", "sm_90"]  # the machine code that a block of each case's launches is run on
