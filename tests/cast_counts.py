"""Counts casts of weights, and ways to write to a weight, for tests of the cast cache."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.linear_cases import torchs

B16 = torch.bfloat16


class Casts(TorchDispatchMode):
    """Counts the casts of tensors of a parameter's shape."""

    def __init__(self, *shapes):
        super().__init__()
        self.shapes, self.count = shapes, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._to_copy.default and args[0].shape in self.shapes
        return func(*args, **(kwargs or {}))


def forward(layer, backward=True, dtype=B16, **keywords):
    with torch.autocast("cpu", dtype=dtype, **keywords):
        y = layer(torch.ones(3, 7))
    if backward:
        y.float().square().sum().backward()
    return y.detach()


def autocast(**keywords):
    return torch.autocast("cpu", dtype=B16, **keywords)


class ThroughData(torch.optim.SGD):
    """Writes through ``weight.data``, as many old optimizers do."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data -= 0.1 * parameter.grad.data


def by_torch(layer):
    with autocast(), torch.no_grad():
        return torchs(torch.ones(3, 7), layer.weight, layer.bias, "gelu")


def assert_fresh(layer, y):
    torch.testing.assert_close(y, by_torch(layer), rtol=0.02, atol=0.02)
