"""A whole optimizer step under loss scaling, clipping included, beside torch.amp with its fused AdamW."""

import torch

from benchmarks.pairs import Pair
from mpkernels.optim import AdamW


class Loop:
    """What follows backward in a training loop."""

    def __init__(self, optimizer, params, device):
        self.optimizer, self.params = optimizer, params
        self.scaler = torch.amp.GradScaler(device, init_scale=1.0, growth_interval=10**9)
        self.scaler.scale(torch.ones((), device=device))  # makes the scale

    def with_torchs_clipping(self):
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def with_ours(self):
        self.optimizer.grad_scale = self.scaler._scale  # as a scaler hands it over
        self.optimizer.step()


def parameters(values, dtype):
    params = [torch.nn.Parameter(value.to(dtype)) for value in values]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def test_adamw(compare, grads, device, setting):
    """fp32 parameters, or 16-bit ones with a split master; torch's are fp32."""
    ours, theirs = parameters(grads, grads[0].dtype), parameters(grads, torch.float32)
    with_ours = Loop(AdamW(ours, max_norm=1.0), ours, device).with_ours
    with_torchs = Loop(torch.optim.AdamW(theirs, fused=True), theirs, device).with_torchs_clipping
    # The grads are read twice, for their norm and for the step; the weight (with its remainder, 4 bytes either way) and
    # two fp32 moments are read and written once.
    moved = sum(2 * grad.nbytes + 24 * grad.numel() for grad in grads)
    compare(Pair("adamw_", with_ours, with_torchs, calls=1, moved=moved))
