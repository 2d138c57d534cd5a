"""Small trainings, to be run on the CPU and on CUDA devices in all ways that a host can drive them."""

from functools import partial

import torch
from torch import nn

from mpkernels import Metrics
from mpkernels.amp import GradScaler, autocast, clip_grad_norm_
from mpkernels.nn import MLP, GatedLinear, LinearAct
from mpkernels.optim import AdamW

CUDA = torch.device("cuda", 0)


def network(*places, dtype=torch.float32):
    """Return layers, spread over these places in turn."""
    torch.manual_seed(0)
    layers = [
        LinearAct(24, 32, activation="gelu_tanh"),
        GatedLinear(32, 16),
        MLP(16, 24, activation="gelu"),
        MLP(16, 24, gated=True),
        nn.Linear(16, 4),
    ]
    return nn.ModuleList(layer.to(places[i % len(places)], dtype) for i, layer in enumerate(layers))


def forward(layers, x):
    for layer in layers:
        weight = next(layer.parameters())
        x = layer(x.to(weight.device))
    return x


def batch(step, place="cpu"):
    return torch.randn(40, 24, generator=torch.Generator().manual_seed(step)).to(place)


def captured(step, mode="global", stream=None):
    """Return a graph of the step."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode=mode):
        step()
    return graph


def on_side(place=CUDA):
    """Return a side stream that waits for the current stream's work."""
    side = torch.cuda.Stream(place)
    side.wait_stream(torch.cuda.current_stream(place))
    return side


_adamw = partial(AdamW, lr=1e-2)


class Loop:
    """A loop under a loss scaler, as users write it; ``way`` says what else the loop does."""

    def __init__(self, *places, unscales=False, clips=False, layers=None, make=_adamw, **options):
        self.layers = network(*places) if layers is None else layers
        self.optimizer = make(self.layers.parameters(), **options)
        self.scaler = GradScaler("cuda", init_scale=2.0**12, growth_interval=2)
        self.metrics = Metrics(self.optimizer, self.scaler)
        self.unscales, self.clips = unscales, clips

    def step(self, x, poisons=False):
        self.optimizer.zero_grad(set_to_none=False)
        with autocast("cuda", torch.bfloat16, cache_enabled=False), autocast("cpu", torch.bfloat16):
            loss = forward(self.layers, x).float().square().mean()
        self.scaler.scale(loss).backward()
        if poisons:
            next(self.layers.parameters()).grad[0, 0] = float("inf")
        if self.unscales:
            self.scaler.unscale_(self.optimizer)
        if self.clips:
            clip_grad_norm_(self.layers.parameters(), 0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def run(self, steps=5):
        for step in range(steps):
            self.step(batch(step), poisons=step == 2)
        return self

    def results(self):
        """Return the loss scale, the steps that were skipped, and the parameters."""
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)
        numbers = self.scaler.get_scale(), int(self.scaler.skipped_steps)
        return numbers, [param.detach().cpu() for param in self.layers.parameters()]


def assert_alike(got, wanted, tolerance=2e-2):
    assert got[0] == wanted[0]
    for ours, theirs in zip(got[1], wanted[1], strict=True):
        assert (ours - theirs).norm() <= tolerance * theirs.norm()


def assert_same(got, wanted):
    assert got[0] == wanted[0]
    assert all(map(torch.equal, got[1], wanted[1]))


WAYS = [{}, {"max_norm": 0.5}, {"unscales": True, "clips": True}, {"state_dtype": torch.int8}, {"guard": True}]
