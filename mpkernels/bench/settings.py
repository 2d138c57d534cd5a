"""What every op is measured at: a place, a dtype and a list of shapes."""

from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NOISE = 2**20  # so many random numbers


class Place(NamedTuple):
    device: str
    threads: int

    def __str__(self) -> str:
        return "cuda" if self.device == "cuda" else f"cpu-{self.threads}"


class Case(NamedTuple):
    name: str
    shapes: tuple[tuple[int, ...], ...] = ()
    clock: str = "device"  # see pairs.STOPWATCHES


class Setting(NamedTuple):
    place: Place
    dtype: str
    case: Case

    def __str__(self) -> str:
        return f"{self.place} {self.dtype} {self.case.name}"

    def tensors(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Random, since on a GPU zeros draw less power and run faster; the same numbers again and again, for to draw
        them takes a CPU longer than many a measurement."""
        device, dtype = self.place.device, dtype or DTYPES[self.dtype]
        generator = torch.Generator(device).manual_seed(0)
        tensors = [torch.empty(shape, device=device, dtype=dtype) for shape in self.case.shapes]
        parts = [*chain.from_iterable(tensor.view(-1).split(NOISE) for tensor in tensors)]
        noise = torch.randn(max(map(len, parts), default=0), device=device, dtype=dtype, generator=generator)
        for part in parts:
            part.copy_(noise[: len(part)])
        return tensors


def gpt2_shapes(
    width: int, vocabulary: int = 50257, positions: int = 1024, layers: int = 12
) -> tuple[tuple[int, ...], ...]:
    """The 148 parameters of GPT-2 small at width 768."""
    norm = [(width,), (width,)]
    attention = [(width, 3 * width), (3 * width,), (width, width), (width,)]
    mlp = [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return ((vocabulary, width), (positions, width), *(norm + attention + norm + mlp) * layers, *norm)


LISTS = {
    "cpu": [Case("1x2^25", ((2**25,),)), Case("gpt2-half-width", gpt2_shapes(width=384))],
    "cuda": [Case("1x50M", ((50_000_000,),)), Case("1x1e9", ((10**9,),)), Case("gpt2", gpt2_shapes(width=768))],
}
LISTS_ANYWHERE = [
    Case("100x500k", ((500_000,),) * 100),
    Case("1000x5k", ((5_000,),) * 1000),
    Case("1x2^20-in-cache", ((2**20,),)),
    Case("1000x10-host-cost", ((10,),) * 1000, clock="host"),  # the work itself is next to nothing
]


def places() -> list[Place]:
    """Return one thread, as torchrun has it; as many as torch takes, by OMP_NUM_THREADS or the cores; the GPU."""
    on_cpu = [Place("cpu", threads) for threads in sorted({1, torch.get_num_threads()})]
    return on_cpu + [Place("cuda", 1)] * torch.cuda.is_available()


def lists(place: Place) -> list[Setting]:
    """Lists of tensors as optimizers get them."""
    return [Setting(place, dtype, case) for case in [*LISTS[place.device], *LISTS_ANYWHERE] for dtype in DTYPES]
