"""torchao's CPUOffloadOptimizer makes one optimizer for each parameter, so features that need all grads are refused."""

import pytest
import torch

from mpkernels.amp import GradScaler
from mpkernels.optim import AdamW, Masters
from tests import libraries
from tests.hard_grads import same_bits
from tests.networks import B16, backward, network
from tests.optim.optimizers import each_of_any_shape

libraries.need()
from tests.matrix.offloading import CPUOffloadOptimizer, on_a_cpu  # noqa: E402

REFUSED = (
    r"^\w+: max_norm and guard need the grads of all parameters, and torchao's CPUOffloadOptimizer makes an optimizer "
    r"of each parameter; give it guard=False without max_norm, or use fully_shard \(FSDP2\) with a CPUOffloadPolicy in "
    r"its place$"
)
F32 = torch.float32


class Derived(CPUOffloadOptimizer):
    pass


def masters_around_sgd(params, **options):
    return Masters(torch.optim.SGD(params, lr=0.1), **options)


@pytest.fixture(autouse=True)
def _on_a_cpu():
    with on_a_cpu():
        yield


@each_of_any_shape
@pytest.mark.parametrize("kind", [CPUOffloadOptimizer, Derived])
def test_what_needs_all_grads_is_refused(line, kind):
    for dtype, options in ((F32, {"max_norm": 1.0}), (F32, {"guard": True}), (B16, {"max_norm": 1.0}), (B16, {})):
        for make in (line.ours, masters_around_sgd):
            with pytest.raises(ValueError, match=REFUSED):
                kind(network(dtype).parameters(), make, minimal_size=0, **options)


@pytest.mark.parametrize("dtype", [F32, B16], ids=str)
@each_of_any_shape
def test_without_max_norm_and_guard_the_result_is_right(line, dtype):
    """The way out is one optimizer of all parameters."""
    for options in ({"guard": False}, {"guard": False, "state_dtype": torch.int8}):
        model, twin = network(dtype), network(dtype)
        offloaded = CPUOffloadOptimizer(model.parameters(), line.ours, minimal_size=100, **options)
        plain = line.ours(twin.parameters(), **options)
        for seed in range(3):
            for it, optimizer in ((model, offloaded), (twin, plain)):
                backward(it, seed)
                optimizer.step()
                optimizer.zero_grad()
        assert offloaded.d_opt is not None
        assert len(offloaded.optim_dict) == 2
        assert all(map(same_bits, model.parameters(), twin.parameters()))


def test_a_scaler_is_refused():
    """Our scaler's check wouldn't wait for copies to the host. torch's scaler isn't ours to refuse."""
    model = network()
    optimizer, scaler = CPUOffloadOptimizer(model.parameters(), AdamW, minimal_size=0), GradScaler("cpu")
    backward(model, 0, scaler.scale(torch.ones(())))
    for use in (scaler.unscale_, scaler.step):
        with pytest.raises(
            TypeError, match=r"^GradScaler: optimizer must not be torchao's CPUOffloadOptimizer, .*Policy"
        ):
            use(optimizer)
    GradScaler("cpu", enabled=False).step(optimizer)


def test_small_parameters_alone_are_stepped_together():
    model = network(B16)
    backward(model, 0)
    want = torch.nn.utils.get_total_norm([param.grad.float() for param in model.parameters()])
    optimizer = CPUOffloadOptimizer(model.parameters(), AdamW, minimal_size=10**6, max_norm=0.1)
    optimizer.step()
    assert abs(optimizer.d_opt.grad_norm - want) <= 2.0**-20 * want


def test_other_optimizers_of_a_tensor_on_the_host_are_not_refused():
    """A user may offload one flat tensor by hand while an optimizer of torchao's is alive."""
    other = CPUOffloadOptimizer(network().parameters(), AdamW, minimal_size=0)
    host = torch.ones(50, dtype=B16)
    host.grad = torch.full((50,), 3.0, dtype=B16)
    optimizer = AdamW([host], lr=0.1, max_norm=1.0)
    optimizer.step()
    assert optimizer.grad_norm > 21
    assert (host != 1).all()
    assert len(other.optim_dict) == 6
