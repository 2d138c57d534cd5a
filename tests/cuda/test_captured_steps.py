"""A training step in a CUDA graph: captured in each mode, after eager steps whose outcome is on its way still, and
replayed between others. It trains as the eager loop does, bit for bit."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from mpkernels import Metrics
from mpkernels.amp import GradScaler, autocast
from mpkernels.linear import cast_cache
from mpkernels.nn import GatedLinear, LinearAct
from mpkernels.optim import AdamW
from tests.cuda.training import CUDA, WAYS, Loop, assert_same, batch, on_side

MODES = ["global", "thread_local", "relaxed"]


def captured(step, mode="global", stream=None):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode=mode):
        step()
    return graph


@pytest.mark.parametrize("place", [0, 1], ids=["on the first device", "on the second"])
@pytest.mark.parametrize("stream", ["same", "another"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_replays_train_as_eager_steps(way, mode, stream, place):
    if place >= torch.cuda.device_count():
        pytest.skip("there is one CUDA device")
    device = torch.device("cuda", place)

    def train(uses_graph):
        loop, x = Loop(device, **way), batch(0, device)
        side = on_side(device)
        with torch.cuda.stream(side):
            for _ in range(2):
                loop.step(x)
        capturing = side if stream == "same" else torch.cuda.Stream(device)
        capturing.wait_stream(side)
        torch.cuda.current_stream().wait_stream(side)
        replay = captured(lambda: loop.step(x), mode, capturing).replay if uses_graph else lambda: loop.step(x)
        for step in range(5):
            x.copy_(batch(step))
            if step == 2:
                x[0, 0] = float("inf")
            loop.step(x) if step == 3 else replay()
        return loop.results()

    with torch.cuda.device(device):
        assert_same(train(True), train(False))


@pytest.mark.parametrize("asked", ["metrics", "optimizer", "scaler"])
def test_the_last_outcome_may_be_asked_for_in_a_capture(asked):
    """By a loop that logs the step before, captured as it is."""
    loop, x = Loop(CUDA, max_norm=1.0), batch(0, CUDA)
    ask = {
        "metrics": loop.metrics.read,
        "optimizer": lambda: loop.optimizer.step_was_skipped,
        "scaler": lambda: loop.scaler.step_was_skipped,
    }[asked]

    def step():
        ask()
        loop.step(x)

    step()
    graph = captured(step)
    graph.replay()
    x[0, 0] = float("inf")
    graph.replay()
    torch.cuda.synchronize()
    assert int(loop.scaler.skipped_steps) == 1


def test_pinned_batches_between_replays():
    """A DataLoader's pinned memory is freed and taken while replays are on their way."""
    loop, x = Loop(CUDA), batch(0, CUDA)
    batches = torch.stack([batch(step) for step in range(6)])
    loop.step(x)
    torch.cuda.synchronize()
    told = loop.metrics.read()
    graph = captured(lambda: loop.step(x))
    assert loop.metrics.read() == told  # they follow no captured step
    eager = Loop(CUDA)
    eager.step(x)
    for (pinned,) in DataLoader([(it,) for it in batches], batch_size=None, pin_memory=True):
        x.copy_(pinned, non_blocking=True)
        graph.replay()
        Metrics(loop.optimizer).read()
    for each in batches:
        eager.step(each.to(CUDA))
    assert_same(loop.results(), eager.results())


def test_a_capture_that_fails_leaves_the_optimizer_usable():
    loop, x = Loop(CUDA, max_norm=1.0), batch(0, CUDA)
    wanted = Loop(CUDA, max_norm=1.0)
    for it in (loop, wanted):
        it.step(x)

    def fails():
        loop.step(x)
        x.sum().item()

    stream = torch.cuda.current_stream()
    with pytest.raises(RuntimeError, match="captur"):
        captured(fails)
    torch.cuda.set_stream(stream)
    for it in (loop, wanted):
        it.optimizer.zero_grad()
        it.step(x)
    assert loop.results()[0] == wanted.results()[0]


def test_a_replay_casts_the_weights_as_they_are_then():
    """Not as they were in the autocast block around the capture, where a cast may have been made before."""
    weight = nn.Parameter(torch.randn(32, 24, device=CUDA))
    graph, stream = torch.cuda.CUDAGraph(), on_side()
    with autocast("cuda", torch.bfloat16), torch.cuda.stream(stream):
        cast_cache.cast(weight, torch.bfloat16)
        with torch.cuda.graph(graph, stream=stream):
            got = cast_cache.cast(weight, torch.bfloat16) * 1
    torch.cuda.current_stream().wait_stream(stream)
    with torch.no_grad():
        weight.mul_(2)
    graph.replay()
    assert torch.equal(got, weight.bfloat16())


@pytest.mark.parametrize("layer", ["linear", "gated"])
def test_graphed_callables(layer):
    """torch.cuda.make_graphed_callables captures a layer's forward and backward by itself."""
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    torch.manual_seed(0)
    module = LinearAct(24, 32, activation="gelu_tanh") if layer == "linear" else GatedLinear(24, 32, activation="silu")
    module.to(CUDA)
    x = batch(0, CUDA).requires_grad_()
    leaves = [x, *module.parameters()]

    def run(function):
        with autocast("cuda", torch.bfloat16, cache_enabled=False):
            y = function(x)
        return [y.detach().clone(), *torch.autograd.grad(y.float().sum(), leaves)]

    wanted = run(module)
    with autocast("cuda", torch.bfloat16, cache_enabled=False):
        graphed = torch.cuda.make_graphed_callables(module, (batch(1, CUDA).requires_grad_(),))
    assert all(map(torch.equal, wanted, run(graphed)))


def test_a_graph_outlives_the_plan_it_was_captured_with():
    """The plan of a step is made anew when other parameters have grads. What the graph reads of the old one stays."""

    def train(uses_graph):
        params = [nn.Parameter(torch.full((50 + i,), 1.0, device=CUDA)) for i in range(3)]
        grads = [torch.full_like(param, 0.5) for param in params]
        optimizer = AdamW(params, lr=0.1, max_norm=1.0)

        def step(*used):
            for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
                param.grad = grad if i in used else None
            optimizer.step()

        step(0, 1, 2)
        replay = captured(lambda: step(0, 1, 2)).replay if uses_graph else lambda: step(0, 1, 2)
        replay()
        step(0, 2)
        others = [torch.full((1000,), 7.0, device=CUDA) for _ in range(50)]
        replay()
        assert all(bool((it == 7).all()) for it in others)
        return [param.detach().cpu() for param in params]

    assert all(map(torch.equal, train(True), train(False)))


def test_a_captured_step_of_torchs_under_either_scaler():
    def train(scaler):
        param = nn.Parameter(torch.ones(64, device=CUDA))
        optimizer = torch.optim.AdamW([param], lr=torch.tensor(0.1, device=CUDA), fused=True, capturable=True)
        param.grad = torch.zeros_like(param)

        def step():
            param.grad.zero_()
            scaler.scale((param * 3).sum()).backward()
            scaler.step(optimizer)
            scaler.update()

        side = on_side()
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        captured(step).replay()
        return param.detach().cpu()

    ours, theirs = (train(scaler_class("cuda", init_scale=8.0)) for scaler_class in (GradScaler, torch.amp.GradScaler))
    torch.testing.assert_close(ours, theirs)
