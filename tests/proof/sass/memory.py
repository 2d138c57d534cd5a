"""What a kernel's addresses lead to: this process's own memory, which a warp reads, and what it stores on top."""

import bisect
import ctypes
from pathlib import Path

import numpy as np

Lanes = np.ndarray  # one number for each of a warp's 32 lanes
LANES = 32
PAGE = 4096


class Memory:
    """Stores go nowhere but here, so that the tensors of a launch serve for the next one."""

    def __init__(self) -> None:
        self.stored: dict[int, int] = {}  # a byte each
        self._pages: set[int] = set()  # where they are
        maps = [line.split()[:2] for line in Path("/proc/self/maps").read_text().splitlines()]
        spans = [[int(end, 16) for end in span.split("-")] for span, access in maps if access[0] == "r"]
        self._begins, self._ends = [span[0] for span in spans], [span[1] for span in spans]

    def read(self, address: int, size: int) -> bytes:
        i = bisect.bisect(self._begins, address) - 1
        if i < 0 or address + size > self._ends[i]:
            raise MemoryError(f"no memory at {address:#x}")
        found = ctypes.string_at(address, size)
        if self._pages.isdisjoint(range(address // PAGE, (address + size - 1) // PAGE + 1)):
            return found
        return bytes(self.stored.get(address + j, byte) for j, byte in enumerate(found))

    def write(self, address: int, content: bytes) -> None:
        self.stored.update(zip(range(address, address + len(content)), content, strict=True))
        self._pages.update((address // PAGE, (address + len(content) - 1) // PAGE))


class Shared:
    def __init__(self) -> None:
        self.content = bytearray(256 << 10)
        self.votes: dict[int, bool] = {}  # by the number of the block's meeting: whether any lane has said yes

    def read(self, address: int, size: int) -> bytes:
        address &= 0xFFFFFF  # above it is the number of the block in its cluster
        return bytes(self.content[address : address + size])

    def write(self, address: int, content: bytes) -> None:
        address &= 0xFFFFFF
        self.content[address : address + len(content)] = content


# Where in constant bank 0 a kernel finds the block's and the grid's dimensions.
DIMENSIONS = {"sm_80": (0x0, 0xC), "sm_90": (0x0, 0xC), "sm_100": (0x360, 0x370)}


class Constants:
    """Bank 0 has the launch's parameters; what stands before them depends on the chip."""

    def __init__(
        self, chip: str, at: int, parameters: bytes, grid: tuple[int, ...], block: int, banks: dict[int, bytes]
    ) -> None:
        size = 1 << 16
        first = bytearray(size)
        first[at : at + len(parameters)] = parameters
        for place, counts in zip(DIMENSIONS[chip], ((block,), grid), strict=True):
            first[place : place + 12] = np.array([*counts, 1, 1][:3], np.uint32).tobytes()
        self.banks = {0: bytes(first), **{bank: it.ljust(size, b"\0") for bank, it in banks.items()}}

    def read(self, bank: int, address: int, size: int) -> bytes:
        address &= 0xFFFF
        return self.banks[bank][address : address + size]
