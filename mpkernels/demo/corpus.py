"""Text that every machine has: the sources of Python's standard library."""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

ENOUGH = 8_000_000  # bytes
HELD_OUT = 0.05  # of them


class Corpus:
    def __init__(self, device: torch.device, seed: int) -> None:
        library, data = Path(sysconfig.get_path("stdlib")), bytearray()
        for path in sorted(library.rglob("*.py")):
            if {"site-packages", "dist-packages", "test"} & set(path.relative_to(library).parts):
                continue
            data += path.read_bytes()
            if len(data) > ENOUGH:
                break
        self.seed, self.size = seed, len(data)
        if self.size < 100_000:
            raise FileNotFoundError(f"this Python has no sources of its standard library in {library}")
        text = torch.frombuffer(data, dtype=torch.uint8).to(device)
        cut = int(self.size * (1 - HELD_OUT))
        self.training, self.held_out = text[:cut], text[cut:]

    def batch(self, step: int, rows: int, context: int, held_out: bool = False) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of a step: the same whenever it is asked."""
        text = self.held_out if held_out else self.training
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        starts = torch.randint(len(text) - context - 1, (rows, 1), generator=generator)
        bytes_ = text[(starts + torch.arange(context + 1)).to(text.device)].long()
        return bytes_[:, :-1], bytes_[:, 1:]
