"""The demo's model, a transformer over bytes in plain torch, and its text, which every machine has."""

import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Embedding, LayerNorm, Linear, Module, ModuleList, Transformer, TransformerEncoderLayer, init
from torch.nn.functional import pad


class Size(NamedTuple):
    width: int
    layers: int
    heads: int
    context: int
    batch: int
    lr: float


SIZES = {
    "cpu": Size(width=192, layers=2, heads=4, context=64, batch=8, lr=2e-3),
    "cuda": Size(width=768, layers=8, heads=12, context=256, batch=32, lr=6e-4),
}


class Predictor(Module):
    """Predicts the next byte from embeddings of single bytes and of pairs of bytes. Most of its parameters are
    embeddings, as in small language models."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.bytes, self.pairs, self.places = (Embedding(it, size.width) for it in (256, 256 * 256, size.context))
        for embedding in (self.bytes, self.pairs, self.places):
            init.normal_(embedding.weight, std=0.02)
        shape = size.width, size.heads, 4 * size.width
        self.layers = ModuleList(
            TransformerEncoderLayer(*shape, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
            for _ in range(size.layers)
        )
        self.norm, self.head = LayerNorm(size.width), Linear(size.width, 256)

    def forward(self, inputs: Tensor) -> Tensor:
        context, before = inputs.shape[1], pad(inputs[:, :-1], (1, 0))
        x = self.bytes(inputs) + self.pairs(256 * before + inputs) + self.places.weight[:context]
        mask = Transformer.generate_square_subsequent_mask(context, x.device, x.dtype)
        for layer in self.layers:
            x = layer(x, mask, is_causal=True)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def sources(device: torch.device) -> Tensor:
    """Return the bytes of the modules of Python's standard library."""
    library = Path(sysconfig.get_path("stdlib"))
    text = bytearray().join(path.read_bytes() for path in sorted(library.glob("*.py")))
    if len(text) < 100_000:
        raise FileNotFoundError(f"this Python has no sources of its standard library in {library}")
    return torch.frombuffer(text, dtype=torch.uint8).to(device)


def batch(text: Tensor, size: Size, seed: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, the same for each seed."""
    draws = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - size.context - 1, (size.batch, 1), generator=draws)
    window = text[(starts + torch.arange(size.context + 1)).to(text.device)].long()
    return window[:, :-1], window[:, 1:]
