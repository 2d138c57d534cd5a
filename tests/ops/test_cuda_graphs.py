"""A captured step replays as it would run: everything that changes from step to step is read on the device."""

from contextlib import contextmanager

import pytest
import torch

from mpkernels.amp import GradScaler, autocast, clip_grad_norm_
from mpkernels.functional import linear_act
from mpkernels.nn import LinearAct
from mpkernels.optim import AdamW
from tests.graphs import captured
from tests.hard_grads import same_bits
from tests.linear_cases import layer
from tests.networks import B16, F16, batch, network

MODES = [
    (torch.float32, {"max_norm": 1.0}),
    (torch.float32, {"guard": True, "amsgrad": True}),
    (B16, {"max_norm": 1.0}),
    (B16, {"master": "fp32"}),
    (B16, {"state_dtype": torch.int8}),
    (F16, {"state_dtype": B16}),
]


@pytest.fixture
def capturing(target):
    """Return the target if its work can be captured and replayed."""
    if str(target) in ("cpu-native", "cpu-cuda"):
        pytest.skip("computes at once, on the host: nothing can be captured")
    return target


def set_grads(model, seed):
    """Set grads in place, as a graph needs it, with an inf every seventh time."""
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        grad = torch.randn(param.shape, generator=generator) * (1 + seed % 3)
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        param.grad.copy_(grad)
    if seed % 7 == 3:
        next(model.parameters()).grad[0, 0] = float("inf")


@pytest.mark.each_value_once
@pytest.mark.parametrize(("dtype", "options"), MODES, ids=str)
def test_replayed_steps_give_the_bits_of_eager_steps(dtype, options, capturing):
    device = capturing.device
    models = [network(dtype, device) for _ in range(2)]
    optimizers = []
    for model in models:
        lr = torch.tensor(1e-2, device=device)
        optimizers.append(AdamW(model.parameters(), lr=lr, **options))
    for model, optimizer in zip(models, optimizers, strict=True):  # the first step makes states and compiles kernels
        set_grads(model, 0)
        optimizer.step()
    with captured(capturing) as graph:
        optimizers[0].step()
    replays = 100 if device.type == "cuda" else 5
    for seed in range(1, 1 + replays):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.param_groups[0]["lr"].fill_(1e-2 / seed)
            set_grads(model, seed)
        graph.replay()
        optimizers[1].step()
    assert all(map(same_bits, models[0].parameters(), models[1].parameters()))
    assert torch.equal(optimizers[0].grad_norm, optimizers[1].grad_norm)
    assert optimizers[0].skipped_steps.item() == optimizers[1].skipped_steps.item() == (replays + 4) // 7
    replayed, eager = (optimizer.overflow_report().as_dict() for optimizer in optimizers)
    assert replayed == eager
    assert [it["first"] for it in replayed["culprits"]] == [[0, 0]]


@contextmanager
def warming_up(device):
    """Warm up on a side stream, as torch.cuda.graph demands, ordered after earlier work and before later work."""
    if device.type != "cuda":
        yield
        return
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream(device).wait_stream(side)


def ours(params):
    return AdamW(params, lr=1e-2, max_norm=0.1)


def torchs(params):
    params = list(params)
    return torch.optim.AdamW(params, lr=1e-2, fused=True, capturable=params[0].is_cuda)


def just_step(scaler, optimizer, model):
    scaler.step(optimizer)


def unscale_and_clip(scaler, optimizer, model):
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)


BOUNDED = {"max_scale": 2.0**11, "min_scale": 2.0**9, "hysteresis": 2}


@pytest.mark.parametrize(
    ("make", "step", "options"),
    [
        (ours, just_step, {}),
        (ours, unscale_and_clip, BOUNDED),
        (torchs, just_step, BOUNDED),
        (torchs, unscale_and_clip, {}),
    ],
)
def test_a_replayed_iteration_gives_the_bits_of_an_eager_one(make, step, options, capturing):
    """The graph holds forward, backward, unscale_, clip, step and update. The scale grows and backs off in replays."""
    device = capturing.device
    runs = []
    for _ in range(2):
        model = network(torch.float32, device)
        scaler = GradScaler(device.type, init_scale=2.0**10, growth_interval=2, **options)
        runs.append((model, make(model.parameters()), scaler, [it.clone() for it in batch(0, device)]))

    def iterate(model, optimizer, scaler, data):
        inputs, targets = data
        optimizer.zero_grad()
        with autocast(device.type, dtype=B16, cache_enabled=False):
            outputs = model(inputs)
        scaler.scale((outputs.float() - targets).square().mean()).backward()
        step(scaler, optimizer, model)
        scaler.update()

    with warming_up(device):
        for run in runs:
            iterate(*run)
    with captured(capturing) as graph:
        iterate(*runs[0])
    scales = set()
    for seed in range(1, 7):
        for _, _, _, data in runs:
            for old, new in zip(data, batch(seed, device), strict=True):
                old.copy_(new)
            if seed in (2, 4, 5):
                data[0][3, 4] = float("inf")
        graph.replay()
        iterate(*runs[1])
        (model, _, scaler, _), (eager_model, _, eager_scaler, _) = runs
        assert all(map(same_bits, model.parameters(), eager_model.parameters()))
        assert scaler.skipped_steps.item() == eager_scaler.skipped_steps.item()
        assert scaler.step_was_skipped.item() == eager_scaler.step_was_skipped.item() == (seed in (2, 4, 5))
        assert scaler.get_scale() == eager_scaler.get_scale()
        scales.add(scaler.get_scale())
    assert len(scales) >= 2
    replayed, eager = (scaler.overflow_report(model).as_dict() for model, _, scaler, _ in runs)
    assert replayed == eager
    assert replayed["culprits"]


@pytest.mark.parametrize("activation", ["none", "silu"])
def test_a_captured_product_gives_the_bits_of_an_eager_one(activation, capturing):
    """The captured call is the first of its shape. Triton's kernels run before, because no capture can load them."""
    device = capturing.device
    x, weight, bias, _ = layer(48, 24, 40, B16, device)
    with torch.no_grad():
        if capturing.kernel == "triton":
            linear_act(x, weight, bias, activation)
        with captured(capturing) as graph:
            y = linear_act(x, weight, bias, activation)
        for seed in range(3):
            x.copy_(layer(48, 24, 40, B16, device, seed)[0])
            graph.replay()
            assert torch.equal(y, linear_act(x, weight, bias, activation))


def test_a_captured_layer_gives_the_grads_of_an_eager_one(capturing):
    """The captured backward includes the sums of the bias gradient."""
    device, layers = capturing.device, []
    for _ in range(2):
        torch.manual_seed(0)
        layers.append(LinearAct(24, 40, activation="silu", device=device))

    def iterate(layer, x):
        layer.zero_grad()
        with autocast(device.type, dtype=B16, cache_enabled=False):
            y = layer(x)
        y.float().square().sum().backward()

    x = torch.randn(48, 24, device=device)
    for each_layer in layers:
        iterate(each_layer, x)
    with captured(capturing) as graph:
        iterate(layers[0], x)
    for _ in range(3):
        x.normal_()
        graph.replay()
        iterate(layers[1], x)
        for replayed, eager in zip(layers[0].parameters(), layers[1].parameters(), strict=True):
            assert torch.equal(replayed.grad, eager.grad)
