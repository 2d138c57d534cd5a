"""Linear layers at all sizes, the bare function at small ones, and linear_dact: the product of a layer's backward
followed by the backward of the activation before that layer."""

import torch
from torch.nn import Parameter, functional

from mpkernels.bench.linear import Shape
from mpkernels.bench.pairs import Pair, Workload
from mpkernels.bench.settings import DTYPES, Setting
from mpkernels.functional import linear_act
from mpkernels.ops import linear_dact

LAYERS = [(768, 3072), (1024, 4096), (4096, 11008), (4096, 14336), (4096, 16384)]
ROWS = [2**exponent for exponent in range(6, 17)]
SHAPES = {
    "cpu": [Shape(64, 768, 3072), Shape(512, 768, 3072), Shape(512, 1024, 1024)],
    "cuda": [Shape(rows, *layer) for layer in LAYERS for rows in ROWS],
}
SMALL = [Shape(1, 64, 64), Shape(8, 256, 1024)]  # here the call takes longer than the kernel
CALLS = 50  # of a small layer, in each run
MOST_TUNING = (64, 1024, 8192, 65536)  # rows that max-autotune is given: it takes up to a minute for each


def compare_function(setting: Setting, activation: str, trains: bool) -> Pair:
    """Compare the bare function with torch's linear and activation. torch's gelu starts slower than the others."""
    torchs = getattr(functional, activation)
    (rows, inputs, outputs), device = setting.sizes.shapes[0], setting.place.device
    shapes = (rows, inputs), (outputs, inputs), (outputs,)
    x, weight, bias = (torch.randn(shape, device=device, dtype=DTYPES[setting.dtype]) for shape in shapes)
    weight, bias = wanted = Parameter(weight), Parameter(bias)
    dy = torch.ones(rows, outputs, device=device, dtype=x.dtype)

    def calls(is_ours: bool) -> Workload:
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
    """Compare the backward through an MLP's second layer, from ``inputs`` to ``outputs``, and through its activation.
    torch takes three ops."""
    (rows, inputs, outputs), device = setting.sizes.shapes[0], setting.place.device
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
