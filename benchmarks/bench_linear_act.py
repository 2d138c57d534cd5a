"""LinearAct beside torch.nn.Linear and GELU, forward and backward, both under torch.amp's autocast for 16 bits."""

from contextlib import nullcontext

import pytest
import torch

from benchmarks.pairs import Pair
from benchmarks.settings import DTYPES
from mpkernels.nn import LinearAct


@pytest.mark.layers
def test_linear_act(compare, setting, device):
    (rows, features), (outputs, _), _ = setting.case.shapes
    dtype = DTYPES[setting.dtype]
    x = torch.randn(rows, features, device=device, requires_grad=True)
    dy = torch.randn(rows, outputs, device=device, dtype=dtype)
    ours = LinearAct(features, outputs, device=device)
    theirs = torch.nn.Sequential(torch.nn.Linear(features, outputs, device=device), torch.nn.GELU())

    def step(model):
        x.grad = None
        model.zero_grad()
        with nullcontext() if dtype == torch.float32 else torch.autocast(device, dtype=dtype):
            y = model(x)
        y.backward(dy)

    # x, weight, bias, dy and z are read, y, z and the three gradients are written.
    parameters = 2 * (outputs * features + outputs) * 4
    moved = parameters + 2 * x.nbytes + 4 * dy.nbytes
    flops = 6 * rows * features * outputs
    compare(Pair("linear_act", lambda: step(ours), lambda: step(theirs), calls=1, moved=moved, flops=flops))
