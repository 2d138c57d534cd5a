"""update_scale_ beside torch's op, and GradScaler's scale, step and update beside torch.amp's."""

import pytest
import torch

from benchmarks.bench_adamw import fused, parameters
from benchmarks.pairs import Pair
from mpkernels.amp import GradScaler
from mpkernels.ops import update_scale_
from mpkernels.optim import AdamW

NEVER = 10**9  # a scale that grows would end in inf


@pytest.mark.settings("fp32-1000x10-host-cost")
def test_update_scale(compare, setting, device):
    make = {"device": device}
    scale, found_inf = torch.ones((), **make), torch.zeros((), **make)
    tracker, overflows = torch.zeros((), dtype=torch.int32, **make), torch.zeros(2, dtype=torch.int32, **make)

    def ours():
        update_scale_(scale, tracker, found_inf, 2.0, 0.5, NEVER, overflows)

    def theirs():
        torch._amp_update_scale_(scale, tracker, found_inf, 2.0, 0.5, NEVER)

    compare(Pair("update_scale_", ours, theirs, calls=1, moved=36))  # all but the flag are read and written


def loop(scaler, optimizer, device):
    loss = torch.ones((), device=device)

    def after_backward():
        scaler.scale(loss)
        scaler.step(optimizer)
        scaler.update()

    return after_backward


def test_grad_scaler(compare, grads, device):
    """Each with its own AdamW. Without clipping: bench_adamw has that."""
    ours, fp32 = parameters(grads, grads[0].dtype), parameters(grads, torch.float32)
    options = {"init_scale": 1.0, "growth_interval": NEVER}
    with_ours = loop(GradScaler(device, **options), AdamW(ours), device)
    with_torchs = loop(torch.amp.GradScaler(device, **options), fused(fp32), device)
    # As in bench_adamw: grads twice; weight and moments read and written.
    moved = sum(2 * grad.nbytes + 24 * grad.numel() for grad in grads)
    compare(Pair("adamw_", with_ours, with_torchs, calls=1, moved=moved, variant="GradScaler"))
