"""FSDP2 around LinearAct: two processes compute what one does, whoever computes the layer."""

from contextlib import nullcontext
from itertools import product

import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.testing import assert_close

import mpkernels
from mpkernels import selector
from mpkernels.nn import LinearAct
from tests.processes import spawn

B16, F32 = torch.bfloat16, torch.float32
SIZES = (7, 33), (33, 16), (16, 5)


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(*(LinearAct(*sizes) for sizes in SIZES))


def by_torch(parameters, x):
    weights = iter(parameters)
    for weight, bias in zip(weights, weights, strict=True):
        x = functional.gelu(functional.linear(x, weight, bias))
    return x


def losses_and_grads(forward, parameters, x, autocast):
    """Of two steps: the first one's weights must not serve in the second."""
    optimizer, losses = torch.optim.SGD(parameters, lr=0.1), []
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", B16, enabled=autocast):
            loss = forward(x).float().square().mean()
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
    return losses, [it.grad for it in parameters]


def check(rank, mesh, kernel, param_dtype, autocast):
    network = model()
    for layer in (*network, network):
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype, reduce_dtype=F32))
    x = torch.randn(8, 7, generator=torch.Generator().manual_seed(1))
    selector.pin("torch" if kernel == "torch" else None)
    with nullcontext() if kernel == "torch" else mpkernels.backend(kernel):
        losses, grads = losses_and_grads(network, [*network.parameters()], x.chunk(2)[rank], autocast)
    for loss in losses:
        torch.distributed.all_reduce(loss)
    parameters = [*model().parameters()]
    want = losses_and_grads(lambda x: by_torch(parameters, x), parameters, x, autocast)
    is_wide = param_dtype is None and not autocast
    tolerance = {"rtol": 1e-4, "atol": 1e-6} if is_wide else {"rtol": 0.03, "atol": 0.003}  # bf16 has 8 bits
    assert_close(([it / 2 for it in losses], [it.full_tensor() for it in grads]), want, **tolerance)


def on_each(rank):
    mesh = init_device_mesh("cpu", (2,))
    for kernel, precision in product(("native", "reference", "torch"), ((None, False), (B16, False), (None, True))):
        check(rank, mesh, kernel, *precision)


def test_fully_shard(tmp_path):
    spawn(on_each, tmp_path)
