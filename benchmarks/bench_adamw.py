"""A whole optimizer step under loss scaling, clipping included, beside torch.amp's."""

import pytest
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


def compare_steps(compare, grads, device, theirs, variant="", **options):
    """Our parameters have the grads' dtype, and a split master if that is 16 bits wide; torch's are fp32."""
    ours, fp32 = parameters(grads, grads[0].dtype), parameters(grads, torch.float32)
    with_ours = Loop(AdamW(ours, max_norm=1.0, **options), ours, device).with_ours
    with_torchs = Loop(theirs(fp32), fp32, device).with_torchs_clipping
    # The grads are read twice, for their norm and for the step; the weight (with its remainder, 4 bytes either way) and
    # both moments are read and written once.
    moments = 2 * options.get("state_dtype", torch.float32).itemsize
    moved = sum(2 * grad.nbytes + 2 * (4 + moments) * grad.numel() for grad in grads)
    compare(Pair("adamw_", with_ours, with_torchs, calls=1, moved=moved, variant=variant))


def fused(params):
    return torch.optim.AdamW(params, fused=True)


def test_adamw(compare, grads, device):
    compare_steps(compare, grads, device, fused)


@pytest.mark.settings("fp32-100x500k", "fp32-1000x5k")
def test_adamw_beside_torchs_default(compare, grads, device):
    compare_steps(compare, grads, device, torch.optim.AdamW, variant="default")


@pytest.mark.settings("100x500k", "1x1e9")
@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.int8], ids=str)
def test_adamw_with_narrow_moments(compare, grads, device, state_dtype):
    variant = str(state_dtype).removeprefix("torch.") + "-moments"
    compare_steps(compare, grads, device, fused, variant, state_dtype=state_dtype)
