"""A training step in a CUDA graph trains as the eager loop does, bit for bit: captured in each mode, after eager steps
whose outcome is still on its way, and replayed between eager steps."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from mpkernels import Metrics
from mpkernels.amp import GradScaler, autocast
from mpkernels.linear import cast_cache
from mpkernels.nn import MLP, GatedLinear, LinearAct
from mpkernels.optim import AdamW
from tests.cuda.training import CUDA, WAYS, Loop, assert_same, batch, captured, on_side
from tests.optim.optimizers import OPTIMIZERS

MODES = ["global", "thread_local", "relaxed"]


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


@pytest.mark.parametrize("line", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_replays_of_each_optimizer_train_as_eager_steps(line):
    def train(uses_graph):
        loop, x = Loop(CUDA, make=line.ours, max_norm=0.5), batch(0, CUDA)
        loop.step(x)
        torch.cuda.synchronize()
        replay = captured(lambda: loop.step(x)).replay if uses_graph else lambda: loop.step(x)
        for step in range(4):
            x.copy_(batch(step))
            if step == 2:
                x[0, 0] = float("inf")
            replay()
        return loop.results()

    assert_same(train(True), train(False))


@pytest.mark.parametrize("asked", ["metrics", "optimizer", "scaler"])
def test_the_last_outcome_may_be_asked_for_in_a_capture(asked):
    """A loop that logs the step before can be captured unchanged."""
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


def test_pinned_batches_may_come_and_go_between_replays():
    """A DataLoader's pinned memory is freed and taken while replays are on their way."""
    loop, x = Loop(CUDA), batch(0, CUDA)
    batches = torch.stack([batch(step) for step in range(6)])
    loop.step(x)
    torch.cuda.synchronize()
    before = loop.metrics.read()
    graph = captured(lambda: loop.step(x))
    assert loop.metrics.read() == before  # Metrics don't follow captured steps
    eager = Loop(CUDA)
    eager.step(x)
    for (pinned,) in DataLoader([(it,) for it in batches], batch_size=None, pin_memory=True):
        x.copy_(pinned, non_blocking=True)
        graph.replay()
        Metrics(loop.optimizer).read()
    for inputs in batches:
        eager.step(inputs.to(CUDA))
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
    captured(partial(x.add_, 0))  # ends what torch 2.11's generator has begun in a failed capture
    for it in (loop, wanted):
        it.optimizer.zero_grad()
        it.step(x)
    assert loop.results()[0] == wanted.results()[0]


def test_a_replay_casts_the_weights_as_they_are_then():
    """A cast made earlier in the autocast block around the capture must not serve."""
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


LAYERS = {
    "linear": lambda: LinearAct(24, 32, activation="gelu_tanh"),
    "gated": lambda: GatedLinear(24, 32, activation="silu"),
    "mlp": lambda: MLP(24, 32, activation="relu2"),
    "gated mlp": lambda: MLP(24, 32, gated=True),
}


def test_each_replay_draws_another_dropout():
    torch.manual_seed(0)
    module, x = MLP(24, 32, dropout=0.5).to(CUDA), batch(0, CUDA)
    module(x)
    outputs = []
    graph = captured(lambda: outputs.append(module(x)))
    graph.replay()
    first = outputs[0].clone()
    graph.replay()
    assert not torch.equal(outputs[0], first)


@pytest.mark.parametrize("layer", LAYERS)
def test_make_graphed_callables_computes_the_same(layer):
    """torch.cuda.make_graphed_callables captures a layer's forward and backward by itself."""
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    torch.manual_seed(0)
    module = LAYERS[layer]()
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


class Parts:
    """Parameters of several chunks, whose blocks pass their sums to the last block, and grads."""

    def __init__(self):
        self.params = [nn.Parameter(torch.full((size,), 1.0, device=CUDA)) for size in (20_000, 5, 9_000)]
        self.grads = [torch.full_like(param, 0.5) for param in self.params]
        self.optimizer = AdamW(self.params, lr=0.1, max_norm=1.0)

    def step(self, *used):
        for i, (param, grad) in enumerate(zip(self.params, self.grads, strict=True)):
            param.grad = grad if i in used else None
        self.optimizer.step()

    def weights(self):
        return [param.detach().cpu() for param in self.params]


def test_a_graph_outlives_the_plan_it_was_captured_with():
    """When other parameters have grads, a new plan is made. The graph still reads the old plan's tensors."""

    def train(uses_graph):
        parts, stream = Parts(), on_side()
        with torch.cuda.stream(stream):  # all steps: on another stream, a capture would not use their plan
            parts.step(0, 1, 2)
            replay = partial(parts.step, 0, 1, 2)
            if uses_graph:
                replay = captured(replay, stream=stream).replay
            replay()
            parts.step(0, 2)
            others = [torch.full((size,), 7.0, device=CUDA) for size in (20, 60, 150, 1000) for _ in range(50)]
            replay()
            assert all(bool((it == 7).all()) for it in others)
            return parts.weights()

    assert all(map(torch.equal, train(True), train(False)))


def test_a_graph_keeps_its_rows_when_the_plan_gets_others():
    parts = Parts()
    parts.step(0, 1, 2)
    graph = captured(lambda: parts.step(0, 1, 2))
    captured_with = parts.params[1].data
    parts.params[1].data = captured_with.clone()
    parts.step(0, 1, 2)
    before, moved = captured_with.clone(), parts.params[1].detach().clone()
    graph.replay()
    assert not torch.equal(captured_with, before)
    assert torch.equal(parts.params[1], moved)


def test_an_eager_step_does_not_use_rows_of_a_capture():
    """A captured copy of rows has not been done yet when an eager step follows on the same stream."""
    results = []
    for captures in (True, False):
        parts, stream = Parts(), on_side()
        with torch.cuda.stream(stream):
            parts.step(0, 1, 2)
            parts.step(0, 1)  # with another plan, so that the next has to take its rows to the device
            if captures:
                captured(lambda parts=parts: parts.step(0, 1, 2), stream=stream)
            for _ in range(2):
                parts.step(0, 1, 2)
            results.append(parts.weights())
    assert all(map(torch.equal, *results))


def test_torchs_step_can_be_captured_under_either_scaler():
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


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("scaler_class", [GradScaler, torch.amp.GradScaler])
def test_hooks_in_a_capture_are_refused_before_anything_is_done(scaler_class):
    param = nn.Parameter(torch.ones(3, device=CUDA))
    optimizer, scaler = AdamW([param], lr=0.5), scaler_class("cuda", init_scale=8.0)
    optimizer.register_step_pre_hook(lambda *_: None)
    param.grad = scaler.scale(torch.ones_like(param))
    with pytest.raises(RuntimeError, match="can't be captured in a CUDA graph under a scaler"):
        captured(lambda: scaler.step(optimizer))
    assert param.grad.tolist() == [8.0] * 3
