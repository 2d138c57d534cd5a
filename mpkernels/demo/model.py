"""A transformer over bytes, as small as one can be that still learns to write code."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Embedding, LayerNorm, Linear, Module, ModuleList, functional


class Size(NamedTuple):
    width: int
    layers: int
    heads: int
    context: int
    batch: int
    lr: float


SIZES = {
    "cpu": Size(width=128, layers=3, heads=4, context=96, batch=16, lr=2e-3),
    "cuda": Size(width=768, layers=12, heads=12, context=512, batch=32, lr=6e-4),
}


class LinearThenAct(Linear):
    """``mpkernels.nn.LinearAct`` by torch alone: the same parameters under the same names."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.gelu(super().forward(input))


class Block(Module):
    def __init__(self, size: Size, linear_act: Callable[[int, int], Module]) -> None:
        super().__init__()
        width, self.heads = size.width, size.heads
        self.norms = ModuleList(LayerNorm(width) for _ in range(2))
        self.qkv, self.out = Linear(width, 3 * width), Linear(width, width)
        self.up, self.down = linear_act(width, 4 * width), Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.attend(self.qkv(self.norms[0](x))))
        return x + self.down(self.up(self.norms[1](x)))  # type: ignore[no-any-return]

    def attend(self, qkv: Tensor) -> Tensor:
        q, k, v = (it.unflatten(-1, (self.heads, -1)).transpose(1, 2) for it in qkv.chunk(3, dim=-1))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Transformer(Module):
    def __init__(self, size: Size, linear_act: Callable[[int, int], Module]) -> None:
        super().__init__()
        self.context = size.context
        self.bytes, self.places = Embedding(256, size.width), Embedding(size.context, size.width)
        self.blocks = ModuleList(Block(size, linear_act) for _ in range(size.layers))
        self.norm, self.head = LayerNorm(size.width), Linear(size.width, 256)
        for embedding in (self.bytes, self.places):
            torch.nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.bytes(inputs) + self.places.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]

    @torch.no_grad()
    def sample(self, prompt: str, length: int, temperature: float = 0.7, seed: int = 0) -> str:
        device = self.head.weight.device
        generator = torch.Generator().manual_seed(seed)
        written = list(prompt.encode())
        for _ in range(length):
            logits = self(torch.tensor([written[-self.context :]], device=device))[0, -1]
            chances = (logits.float().cpu() / temperature).softmax(-1)
            written.append(int(torch.multinomial(chances, 1, generator=generator)))
        return bytes(written).decode(errors="replace")
