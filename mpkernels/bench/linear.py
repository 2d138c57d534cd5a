"""A linear layer and its activation, forward and backward, beside nn.Linear and nn.GELU; fp32 weights, autocast. And
the product in which a layer's backward meets the activation before it."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch.nn import Module, Parameter, functional

from mpkernels.bench.networks import our_layer, torchs_layer
from mpkernels.bench.pairs import Make, Pair, Run
from mpkernels.bench.settings import DTYPES, Case, Setting
from mpkernels.functional import linear_act
from mpkernels.ops import linear_dact


class Shape(NamedTuple):
    rows: int
    inputs: int
    outputs: int

    def __str__(self) -> str:
        return "x".join(map(str, self))


MakeLayer = Callable[[int, int], Module]

LAYERS = [(768, 3072), (1024, 4096), (4096, 11008), (4096, 14336), (4096, 16384)]
ROWS = [2**exponent for exponent in range(6, 17)]
SHAPES = {
    "cpu": [Shape(64, 768, 3072), Shape(512, 768, 3072), Shape(512, 1024, 1024)],
    "cuda": [Shape(rows, *layer) for layer in LAYERS for rows in ROWS],
}
SMALL = [Shape(1, 64, 64), Shape(8, 256, 1024)]  # where the way to the kernel counts
CALLS = 50  # of a small one, in each run
MOST_TUNING = (64, 1024, 8192, 65536)  # rows that max-autotune is given: it takes up to a minute for each


def case(shape: Shape) -> Case:
    return Case(str(shape), (shape,))


def forward_and_backward(setting: Setting, layer: MakeLayer, outputs: int, compiled: bool = False) -> Make:
    """``layer`` makes a module of the case's two sizes; it yields ``outputs`` features."""
    (rows, inputs, hidden), device, dtype = setting.case.shapes[0], setting.place.device, DTYPES[setting.dtype]

    def make() -> Run:
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
    rows, inputs, outputs = setting.case.shapes[0]
    return Pair(
        forward_and_backward(setting, partial(our_layer, activation="gelu"), outputs),
        forward_and_backward(setting, partial(torchs_layer, activation="gelu"), outputs, compiled),
        flops=3 * 2 * rows * inputs * outputs,  # the products for y, dx and dw
        clock="device",
    )


def compare_function(setting: Setting, activation: str, trains: bool) -> Pair:
    """The bare function beside torch's two. torch takes longer to begin with gelu than with all others."""
    torchs = getattr(functional, activation)
    (rows, inputs, outputs), device = setting.case.shapes[0], setting.place.device
    shapes = (rows, inputs), (outputs, inputs), (outputs,)
    x, weight, bias = (torch.randn(shape, device=device, dtype=DTYPES[setting.dtype]) for shape in shapes)
    weight, bias = wanted = Parameter(weight), Parameter(bias)
    dy = torch.ones(rows, outputs, device=device, dtype=x.dtype)

    def calls(is_ours: bool) -> Run:
        def run() -> None:
            with torch.set_grad_enabled(trains):
                for _ in range(CALLS):
                    if is_ours:
                        y = linear_act(x, weight, bias, activation)
                    else:
                        y = torchs(functional.linear(x, weight, bias))
                    if trains:
                        torch.autograd.grad(y, wanted, dy)

        return run

    flops = (2 if trains else 1) * 2 * rows * inputs * outputs  # the products for y and dw
    return Pair(lambda: calls(is_ours=True), lambda: calls(is_ours=False), CALLS, flops=flops, clock="loop")


def compare_dact(setting: Setting) -> Pair:
    """Of a layer that takes ``outputs`` back to ``inputs``, as an MLP's second does. torch takes three ops."""
    (rows, inputs, outputs), device = setting.case.shapes[0], setting.place.device
    generator = torch.Generator(device).manual_seed(0)
    dy, weight, z = (
        torch.randn(shape, device=device, dtype=DTYPES[setting.dtype], generator=generator)
        for shape in ((rows, inputs), (inputs, outputs), (rows, outputs))
    )

    def ours() -> object:
        return linear_dact(dy, weight, z, "gelu", dy.dtype)

    def theirs() -> object:
        dz = torch.ops.aten.gelu_backward(dy @ weight, z)
        return dz, dz.sum(0)

    return Pair(lambda: ours, lambda: theirs, flops=2 * rows * inputs * outputs)
