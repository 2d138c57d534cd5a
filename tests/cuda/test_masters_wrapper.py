"""Masters on a device, where small weights are joined and rounded together."""

import pytest
import torch
from torch.nn import Parameter

from mpkernels.optim import Masters
from tests.cuda.training import CUDA
from tests.hard_grads import same_bits

SHAPES = [(5,), (3, 4), (), (0,), (7, 9), (1,), (130,)]
STEP = 0.5  # exact, so that it doesn't matter where a product is rounded


def stepped(device, dtypes):
    """Return weights and remainders after three steps; the second parameter has no grad, the last is transposed."""
    torch.manual_seed(0)
    params = [Parameter(torch.randn(shape).to(device, dtype)) for dtype in dtypes for shape in SHAPES]
    params.append(Parameter(torch.randn(4, 6).to(device, dtypes[0]).t()))
    optimizer = Masters(torch.optim.SGD(params, lr=STEP))
    for _ in range(3):
        for i, param in enumerate(params):
            grad = torch.randn(param.shape) / 64
            param.grad = None if i == 1 else grad.to(device, param.dtype)
        optimizer.step()
    remainders = [optimizer.state[param]["remainder"] for param in params if "remainder" in optimizer.state[param]]
    return [it.detach().cpu() for it in (*params, *remainders)]


@pytest.mark.parametrize("dtypes", [["bfloat16"], ["float16"], ["bfloat16", "float16", "float32"]], ids="-".join)
def test_steps_give_the_bits_of_a_cpu(dtypes):
    dtypes = [getattr(torch, it) for it in dtypes]
    for ours, wanted in zip(stepped(CUDA, dtypes), stepped("cpu", dtypes), strict=True):
        assert same_bits(ours, wanted)
