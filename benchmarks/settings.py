"""What every op is measured at: a place, a dtype and a list of shapes."""

from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Place(NamedTuple):
    device: str
    threads: int

    def __str__(self) -> str:
        return "cuda" if self.device == "cuda" else f"cpu-{self.threads}"


class Case(NamedTuple):
    name: str
    shapes: list[tuple[int, ...]]
    host_cost: bool = False  # timed by the wall clock, on CUDA too: the work itself is next to nothing


class Setting(NamedTuple):
    place: Place
    dtype: str
    case: Case

    def __str__(self) -> str:
        return f"{self.place}-{self.dtype}-{self.case.name}"

    def tensors(self) -> list[Tensor]:
        """Random, since on a GPU zeros draw less power and run faster."""
        device, dtype = self.place.device, DTYPES[self.dtype]
        generator = torch.Generator(device).manual_seed(0)
        return [torch.randn(shape, device=device, dtype=dtype, generator=generator) for shape in self.case.shapes]


def gpt2_shapes(width: int, vocabulary: int = 50257, positions: int = 1024, layers: int = 12) -> list[tuple[int, ...]]:
    """The 148 parameters of GPT-2 small at width 768."""
    norm = [(width,), (width,)]
    attention = [(width, 3 * width), (3 * width,), (width, width), (width,)]
    mlp = [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [(vocabulary, width), (positions, width), *(norm + attention + norm + mlp) * layers, *norm]


def cases(device: str) -> list[Case]:
    on_device = {
        "cpu": [Case("1x2^25", [(2**25,)]), Case("gpt2-half-width", gpt2_shapes(width=384))],
        "cuda": [Case("1x50M", [(50_000_000,)]), Case("1x1e9", [(10**9,)]), Case("gpt2", gpt2_shapes(width=768))],
    }
    return [
        *on_device[device],
        Case("100x500k", [(500_000,)] * 100),
        Case("1000x5k", [(5_000,)] * 1000),
        Case("1x2^20-in-cache", [(2**20,)]),
        Case("1000x10-host-cost", [(10,)] * 1000, host_cost=True),
    ]


PLACES = [Place("cpu", 1), Place("cpu", 2)] + [Place("cuda", 1)] * torch.cuda.is_available()
SETTINGS = {
    str(setting): setting
    for place in PLACES
    for case in cases(place.device)
    for setting in (Setting(place, dtype, case) for dtype in DTYPES)
}

LAYERS = {  # rows, features -> outputs
    "cpu": [(512, 768, 3072), (256, 1024, 4096)],
    "cuda": [(8192, 768, 3072), (8192, 1024, 4096), (8192, 4096, 11008), (256, 4096, 11008)],
}
LAYER_SETTINGS = {
    str(setting): setting
    for place in PLACES
    for rows, features, outputs in LAYERS[place.device]
    for dtype in DTYPES
    for case in [Case(f"{rows}x{features}-to-{outputs}", [(rows, features), (outputs, features), (outputs,)])]
    for setting in [Setting(place, dtype, case)]
}
