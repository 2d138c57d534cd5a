"""A linear layer and its activation, forward and backward, beside nn.Linear and nn.GELU; fp32 weights, autocast."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch.nn import Module

from mpkernels.bench.networks import our_layer, torchs_layer
from mpkernels.bench.pairs import Make, Pair, Workload
from mpkernels.bench.settings import DTYPES, Setting, Sizes


class Shape(NamedTuple):
    rows: int
    inputs: int
    outputs: int

    def sizes(self) -> Sizes:
        return Sizes("x".join(map(str, self)), (self,))


MakeLayer = Callable[[int, int], Module]


def forward_and_backward(setting: Setting, layer: MakeLayer, outputs: int, compiled: bool = False) -> Make:
    """Return a run of a layer's forward and backward. ``layer`` makes the module, with the setting's two sizes, whose
    output has ``outputs`` features."""
    (rows, inputs, hidden), device, dtype = setting.sizes.shapes[0], setting.place.device, DTYPES[setting.dtype]

    def make() -> Workload:
        torch.manual_seed(0)
        with torch.device(device):
            module = layer(inputs, hidden)
            x, dy = torch.randn(rows, inputs), torch.randn(rows, outputs, dtype=dtype)
        x = x.to(dtype).requires_grad_()
        forward = torch.compile(module, mode="max-autotune-no-cudagraphs") if compiled else module
        wanted = [x, *module.parameters()]

        def run() -> object:
            with torch.amp.autocast(device, dtype, enabled=dtype != torch.float32):
                y = forward(x)
            return torch.autograd.grad(y, wanted, dy)

        return run

    return make


def compare(setting: Setting, compiled: bool = False) -> Pair:
    rows, inputs, outputs = setting.sizes.shapes[0]
    return Pair(
        forward_and_backward(setting, partial(our_layer, activation="gelu"), outputs),
        forward_and_backward(setting, partial(torchs_layer, activation="gelu"), outputs, compiled),
        flops=3 * 2 * rows * inputs * outputs,  # the products for y, dx and dw
    )
