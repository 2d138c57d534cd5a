"""A training step of torch's in fp32: the baseline for a user who doesn't use autocast yet."""

import torch
from torch import nn

from mpkernels.bench import networks, steps
from mpkernels.bench.pairs import Make
from mpkernels.bench.settings import Setting
from mpkernels.bench.training import train as train_once


def train(setting: Setting) -> Make:
    """Train without autocast and scaler. The norm is clipped."""

    def after_forward(network: nn.Module) -> steps.AfterForward:
        step = steps.clip_and_step([*network.parameters()], steps.default, torch.nn.utils.clip_grad_norm_)
        return steps.AfterForward(lambda loss: loss, step)

    return lambda: train_once(
        setting, networks.torchs_layer, after_forward, autocast=False, compiled=False, master=False
    )
