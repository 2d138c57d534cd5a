"""LinearAct under FSDP2 and tensor parallelism: two processes compute what one does, whatever computes the layer."""

from contextlib import nullcontext
from itertools import product

import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn import functional
from torch.testing import assert_close

import mpkernels
from mpkernels import selector
from mpkernels.nn import LinearAct
from mpkernels.nn.parallel import ColwiseParallel
from tests.processes import in_processes, spawn

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
    """Return losses and grads of two steps. The second step must not use the first one's weights."""
    optimizer, losses = torch.optim.SGD(parameters, lr=0.1), []
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", B16, enabled=autocast):
            loss = forward(x).float().square().mean()
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
    return losses, [it.grad for it in parameters]


def assert_fsdp2_trains_as_one_process(rank, mesh, kernel, param_dtype, autocast):
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


class Block(torch.nn.Module):
    def __init__(self, bias):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = torch.nn.LayerNorm(16), LinearAct(16, 34, bias=bias), torch.nn.Linear(34, 16)

    def forward(self, x):
        return self.down(self.up(self.norm(x))) + 0


PLANS = {
    "tensor": {"up": ColwiseParallel(), "down": RowwiseParallel()},
    "sequence": {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Replicate()),
    },
}


def gathered(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def assert_tensor_parallel_computes_as_one_process(rank, mesh, kernel, plan, bias):
    """Sums of at most 34 products, in two layers in a row, may have another order."""
    alone, model = Block(bias), parallelize_module(Block(bias), mesh, PLANS[plan])
    x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(1))
    results = []
    for block, part in ((alone, x), (model, x.chunk(2, 1)[rank] if plan == "sequence" else x)):
        part = part.clone().requires_grad_()
        with mpkernels.backend(kernel):
            y = block(part)
            y.square().sum().backward()
        x_grad = [part.grad] if plan == "tensor" else []
        results.append([y.detach(), *x_grad, *(gathered(param.grad) for param in block.parameters())])
    for want, got in zip(*results, strict=True):
        assert (got - want).abs().max() <= 2 * 34 * 2**-24 * want.abs().max()


def assert_processes_may_have_different_numbers_of_columns(rank, mesh):
    x = torch.randn(5, 16)
    for activation in ("gelu", "relu2"):
        alone, layer = LinearAct(16, 33, activation=activation), LinearAct(16, 33, activation=activation)
        layer.load_state_dict(alone.state_dict())
        layer.bias.requires_grad_(False)
        parallelize_module(layer, mesh, ColwiseParallel(output_layouts=Replicate()))
        assert layer.weight.to_local().shape == ((17, 16), (16, 16))[rank]
        assert not layer.bias.requires_grad
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        for y in (layer(x), compiled(x)):
            assert_close(y, alone(x), rtol=0, atol=2 * 16 * 2**-24 * alone(x).abs().max().item())
        linear = parallelize_module(alone.to_linear(), mesh, ColwiseParallel())  # torch's own layers are split, too
        assert linear(x).shape == (5, (17, 16)[rank])


def check_each_case(rank):
    mesh = init_device_mesh("cpu", (2,))
    for case in product(("native", "reference"), PLANS, (True, False)):
        assert_tensor_parallel_computes_as_one_process(rank, mesh, *case)
    assert_processes_may_have_different_numbers_of_columns(rank, mesh)
    for kernel, precision in product(("native", "reference", "torch"), ((None, False), (B16, False), (None, True))):
        assert_fsdp2_trains_as_one_process(rank, mesh, kernel, *precision)


@in_processes
def test_two_processes(tmp_path):
    spawn(check_each_case, tmp_path)
