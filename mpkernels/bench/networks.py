"""Networks to train. ``layer(inputs, outputs, activation)`` makes their linear layers: ours or torch's."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from mpkernels.nn import LinearAct

Layer = Callable[[int, int, str], nn.Module]


def torchs_layer(inputs: int, outputs: int, activation: str) -> nn.Module:
    linear = nn.Linear(inputs, outputs)
    return {
        "none": linear,
        "gelu": nn.Sequential(linear, nn.GELU()),
        "gelu_tanh": nn.Sequential(linear, nn.GELU(approximate="tanh")),
    }[activation]


def our_layer(inputs: int, outputs: int, activation: str) -> nn.Module:
    return LinearAct(inputs, outputs, activation=activation)


class TransformerLayer(nn.Module):
    def __init__(self, layer: Layer, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = layer(width, 3 * width, "none"), layer(width, width, "none")
        self.mlp = nn.Sequential(layer(width, 4 * width, "gelu_tanh"), layer(4 * width, width, "none"))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        out: Tensor = x + self.mlp(self.norms[1](x))
        return out


class Transformer(nn.Module):
    """A transformer of GPT-2's shape, whose embedding and output layer share a weight."""

    def __init__(self, layer: Layer, width: int, depth: int, heads: int, vocabulary: int, positions: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.blocks = nn.Sequential(*(TransformerLayer(layer, width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[-1]]
        return functional.linear(self.norm(self.blocks(x)), self.tokens.weight)


class Task:
    """A network and a batch to train it on. Each side makes its own network, from the same seed."""

    def __init__(self, make: Callable[[Layer], nn.Module], batch: Callable[[str], tuple[Tensor, Tensor]]) -> None:
        self._make, self.batch = make, batch

    def network(self, layer: Layer, device: str) -> nn.Module:
        torch.manual_seed(0)
        with torch.device(device):
            return self._make(layer)


def regression(depth: int, width: int, rows: int) -> Task:
    return Task(
        lambda layer: nn.Sequential(*(layer(width, width, "gelu") for _ in range(depth))),
        lambda device: (torch.randn(rows, width, device=device), torch.randn(rows, width, device=device)),
    )


def language(width: int, depth: int, heads: int, vocabulary: int, sequences: int, tokens: int) -> Task:
    def batch(device: str) -> tuple[Tensor, Tensor]:
        text = torch.randint(vocabulary, (sequences, tokens + 1), device=device)
        return text[:, :-1], text[:, 1:]

    shape = width, depth, heads, vocabulary, tokens
    return Task(lambda layer: Transformer(layer, *shape), batch)


def loss(output: Tensor, target: Tensor) -> Tensor:
    if target.is_floating_point():
        return functional.mse_loss(output.float(), target)
    return functional.cross_entropy(output.flatten(0, -2).float(), target.flatten())
