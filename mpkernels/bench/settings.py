"""The setting of a case: place, dtype and sizes of tensors."""

from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NOISE = 2**20  # how many random numbers are drawn, to be repeated in all tensors


class Place(NamedTuple):
    device: str
    threads: int

    def __str__(self) -> str:
        return "cuda" if self.device == "cuda" else f"cpu-{self.threads}"


class Sizes(NamedTuple):
    """The shapes of a case's tensors. Results show ``name`` as the case."""

    name: str
    shapes: tuple[tuple[int, ...], ...] = ()
    clock: str = "device"  # see pairs.STOPWATCHES

    @property
    def elements(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes)


class Setting(NamedTuple):
    place: Place
    dtype: str
    sizes: Sizes

    def __str__(self) -> str:
        return f"{self.place} {self.dtype} {self.sizes.name}"

    def tensors(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Return random tensors: a GPU draws less power for zeros, and runs faster. The same numbers are repeated,
        because drawing them takes a CPU longer than many a measurement."""
        device, dtype = self.place.device, dtype or DTYPES[self.dtype]
        generator = torch.Generator(device).manual_seed(0)
        tensors = [torch.empty(shape, device=device, dtype=dtype) for shape in self.sizes.shapes]
        parts = [*chain.from_iterable(tensor.view(-1).split(NOISE) for tensor in tensors)]
        noise = torch.randn(max(map(len, parts), default=0), device=device, dtype=dtype, generator=generator)
        for part in parts:
            part.copy_(noise[: len(part)])
        return tensors


ONE_50M = Sizes("1x50M", ((50_000_000,),))
FOUR_LARGE = Sizes("4x2.5M", ((2_500_000,),) * 4)  # larger than most caches, with few waits among threads
HUNDRED = Sizes("100x500k", ((500_000,),) * 100)
THOUSAND = Sizes("1000x5k", ((5_000,),) * 1000)


def places() -> list[Place]:
    """Return where to measure: on one thread, as torchrun sets it; on as many as torch takes; on the GPU, if any."""
    on_cpu = [Place("cpu", threads) for threads in sorted({1, torch.get_num_threads()})]
    return on_cpu + [Place("cuda", 1)] * torch.cuda.is_available()
