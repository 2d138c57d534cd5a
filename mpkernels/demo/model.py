"""A transformer over bytes, in plain torch. Most of its parameters are embeddings, as in small language models."""

from typing import NamedTuple

from torch import Tensor
from torch.nn import Embedding, LayerNorm, Linear, Module, ModuleList, functional, init


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


class Layer(Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        width, self.heads = size.width, size.heads
        self.norms = ModuleList(LayerNorm(width) for _ in range(2))
        self.qkv, self.out = Linear(width, 3 * width), Linear(width, width)
        self.up, self.down = Linear(width, 4 * width), Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        q, k, v = (it.unflatten(-1, (self.heads, -1)).transpose(1, 2) for it in qkv)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))  # type: ignore[no-any-return]


class Transformer(Module):
    """It predicts each next byte from embeddings of each byte, and of the pair of bytes that ends there."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.bytes, self.pairs = Embedding(256, size.width), Embedding(256 * 256, size.width)
        self.places = Embedding(size.context, size.width)
        self.layers = ModuleList(Layer(size) for _ in range(size.layers))
        self.norm, self.head = LayerNorm(size.width), Linear(size.width, 256)
        for embedding in (self.bytes, self.pairs, self.places):
            init.normal_(embedding.weight, std=0.02)

    def forward(self, inputs: Tensor) -> Tensor:
        before = functional.pad(inputs[:, :-1], (1, 0))
        x = self.bytes(inputs) + self.pairs(256 * before + inputs) + self.places.weight[: inputs.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]
