"""Text that every machine has: the sources of Python's standard library."""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

ENOUGH = 8_000_000  # bytes
HELD_OUT = 0.05  # of them


class Corpus:
    def __init__(self, device: torch.device) -> None:
        library, data = Path(sysconfig.get_path("stdlib")), bytearray()
        for path in sorted(library.rglob("*.py")):
            if len(data) < ENOUGH and not {"site-packages", "dist-packages", "test"} & {*path.parts}:
                data += path.read_bytes()
        if len(data) < 100_000:
            raise FileNotFoundError(f"this Python has no sources of its standard library in {library}")
        text = torch.frombuffer(data, dtype=torch.uint8).to(device)
        self.held_out, self.training = text.tensor_split([int(HELD_OUT * len(text))])

    def batch(self, step: int, rows: int, context: int, held_out: bool = False) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of a step: the same whenever it is asked."""
        text = self.held_out if held_out else self.training
        starts = torch.randint(len(text) - context - 1, (rows, 1), generator=torch.Generator().manual_seed(step))
        window = text[(starts + torch.arange(context + 1)).to(text.device)].long()
        return window[:, :-1], window[:, 1:]
