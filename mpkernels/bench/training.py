"""A whole training step: forward, loss, backward, unscaling, clipping, update."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from mpkernels.bench import networks, steps
from mpkernels.bench.pairs import Make, Pair, Workload
from mpkernels.bench.settings import DTYPES, Setting

TASKS = {
    "mlp-20x1000-batch-512": partial(networks.regression, 20, 1000, 512),
    "mlp-6x512-batch-128": partial(networks.regression, 6, 512, 128),  # takes a tenth of a second on two cores
    "transformer-tiny": partial(
        networks.language, width=128, depth=4, heads=4, vocabulary=1000, sequences=8, tokens=64
    ),
    "gpt2-small-16x1024": partial(
        networks.language, width=768, depth=12, heads=12, vocabulary=50257, sequences=16, tokens=1024
    ),
}

Side = Callable[[nn.Module], steps.AfterForward]


def tasks_on(device: str) -> list[str]:
    return [name for name in TASKS if device == "cuda" or not name.startswith("gpt2")]


def train(
    setting: Setting, layer: networks.Layer, after_forward: Side, *, autocast: bool, compiled: bool, master: bool
) -> Workload:
    """Return a run of a training step. With ``master``, the parameters have the setting's dtype, and the optimizer
    keeps fp32 masters."""
    device, dtype = setting.place.device, DTYPES[setting.dtype]
    task = TASKS[setting.sizes.name]()
    network = task.network(layer, device)
    if master:
        network.to(dtype)
    inputs, targets = task.batch(device)
    if master and inputs.is_floating_point():
        inputs = inputs.to(dtype)
    scale, finish = after_forward(network)
    forward = torch.compile(network) if compiled else network

    def run() -> None:
        with torch.amp.autocast(device, dtype, enabled=autocast):
            loss = networks.loss(forward(inputs), targets)
        scale(loss).backward()
        finish()
        network.zero_grad()

    return run


def ours(setting: Setting, compiled: bool = False, split_master: bool = False) -> Make:
    def after_forward(network: nn.Module) -> steps.AfterForward:
        return steps.our_step([*network.parameters()], setting.place.device)

    return lambda: train(
        setting,
        networks.our_layer,
        after_forward,
        autocast=not split_master,
        compiled=compiled,
        master=split_master,
    )


def torchs(setting: Setting, optimizer: steps.MakeOptimizer, compiled: bool = False) -> Make:
    def after_forward(network: nn.Module) -> steps.AfterForward:
        return steps.torchs_step([*network.parameters()], setting.place.device, optimizer)

    return lambda: train(setting, networks.torchs_layer, after_forward, autocast=True, compiled=compiled, master=False)


def compare(ours: Make, theirs: Make) -> Pair:
    return Pair(ours, theirs, clock="loop", is_counted=True)
