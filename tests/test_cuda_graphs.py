"""A captured step replays as it would run: everything that changes from step to step is read on the device."""

import pytest
import torch

import mpkernels
from mpkernels.functional import linear_act
from mpkernels.optim import AdamW
from tests.cases import same_bits
from tests.linear import layer
from tests.networks import B16, F16, network

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

MODES = [
    (torch.float32, {"max_norm": 1.0}),
    (torch.float32, {"guard": True, "amsgrad": True}),
    (B16, {"max_norm": 1.0}),
    (B16, {"master": "fp32"}),
    (B16, {"state_dtype": torch.int8}),
    (F16, {"state_dtype": B16}),
]


def set_grads(model, seed):
    """In place, as a graph wants them; an inf every seventh time."""
    generator = torch.Generator("cuda").manual_seed(seed)
    for param in model.parameters():
        grad = torch.randn(param.shape, generator=generator, device="cuda") * (1 + seed % 3)
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        param.grad.copy_(grad)
    if seed % 7 == 6:
        next(model.parameters()).grad[0, 0] = float("inf")


@pytest.mark.parametrize("kernel", ["native", "triton"])
@pytest.mark.parametrize(("dtype", "options"), MODES, ids=str)
def test_replayed_steps_are_eager_steps(dtype, options, kernel):
    if kernel not in mpkernels.backends("adamw_", "cuda"):
        pytest.skip(f"no {kernel} kernel")
    with mpkernels.backend(kernel):
        models = [network(dtype, torch.device("cuda")) for _ in range(2)]
        optimizers = []
        for model in models:
            lr = torch.tensor(1e-2, device="cuda")
            optimizers.append(AdamW(model.parameters(), lr=lr, **options))
        for model, optimizer in zip(models, optimizers, strict=True):  # makes states, compiles kernels
            set_grads(model, 0)
            optimizer.step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            optimizers[0].step()
        for seed in range(1, 101):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.param_groups[0]["lr"].fill_(1e-2 / seed)
                set_grads(model, seed)
            graph.replay()
            optimizers[1].step()
        assert all(map(same_bits, models[0].parameters(), models[1].parameters()))
        assert optimizers[0].skipped_steps.item() == optimizers[1].skipped_steps.item() == 14
        replayed, eager = (optimizer.overflow_report().as_dict() for optimizer in optimizers)
        assert replayed == eager
        assert [it["first"] for it in replayed["culprits"]] == [[0, 0]]


@pytest.mark.parametrize("activation", ["none", "gelu_tanh", "silu"])
@pytest.mark.parametrize("features", [24, 20])  # 20: rows that cublasLt doesn't get
def test_a_captured_product_is_an_eager_one(activation, features):
    """The very first of its shape: handles are made and algorithms chosen while the graph is captured."""
    if "native" not in mpkernels.backends("linear_act", "cuda"):
        pytest.skip("no native kernel")
    x, weight, bias, _ = layer(48, features, 40, B16, "cuda")
    graph = torch.cuda.CUDAGraph()
    with mpkernels.backend("native"), torch.no_grad():
        with torch.cuda.graph(graph):
            y = linear_act(x, weight, bias, activation)
        for seed in range(3):
            x.copy_(layer(48, features, 40, B16, "cuda", seed)[0])
            graph.replay()
            assert torch.equal(y, linear_act(x, weight, bias, activation))
