"""Models that to_mixed is tested on, and a function that trains them."""

import torch
from torch import nn

F32 = torch.float32


class LlamaRMSNorm(nn.Module):
    """A norm as libraries write it: not torch's class, and its output takes the weight's dtype."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * wide.square().mean(-1, keepdim=True).add(1e-6).rsqrt()).to(x.dtype)


class NormedLinear(nn.Linear):
    """A linear layer in spite of its name: the weight is a matrix."""

    def forward(self, x):
        return nn.functional.linear(x, nn.functional.normalize(self.weight, dim=1), self.bias)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, 8), LlamaRMSNorm(8)
        self.up, self.head = NormedLinear(8, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.ones(8))

    def forward(self, tokens, scale=1.0):
        return self.head(self.up(self.norm(self.embed(tokens) * self.table))) * scale


TOKENS = torch.arange(10).view(2, 5)


def train_a_step(model, inputs, optimizer):
    out = model(inputs)
    (out[0] if isinstance(out, tuple) else out).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
