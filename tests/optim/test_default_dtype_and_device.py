"""Optimizers step alike for any default dtype and device, with numbers anywhere, and with tensors without memory."""

import contextlib
import math
import subprocess
import sys

import pytest
import torch

from mpkernels.amp import GradScaler
from mpkernels.optim import AdamW
from mpkernels.optim.step_plan import Verdict
from tests.hard_grads import same_bits
from tests.networks import B16, F16, backward, network
from tests.optim.optimizers import all_same_bits, each_optimizer, saved_numbers

I8 = torch.int8


@pytest.mark.each_value_once
@each_optimizer
@pytest.mark.parametrize("default", [B16, F16, torch.float64], ids=str)
def test_steps_are_the_same_under_another_default_dtype(target, line, default):
    """None of our tensors takes the default dtype."""
    results = []
    for dtype in (torch.float32, default):
        params = [torch.ones(3, 1, dtype=it, device=target.device, requires_grad=True) for it in (torch.float32, B16)]
        generator = torch.Generator().manual_seed(0)
        try:
            torch.set_default_dtype(dtype)
            for options in ({}, {"max_norm": 1.0, "state_dtype": I8}):
                optimizer, scaler = line.ours(params, **options), GradScaler(target.device.type)
                for factor in (1.0, 2.0**16, math.inf):  # bare, under the scaler, and a skip
                    for param in params:
                        grad = torch.randn(param.shape, generator=generator, dtype=torch.float32)
                        param.grad = (grad * factor).to(param)
                    if factor > 1:
                        scaler.scale(params[0].detach())
                        scaler.step(optimizer)
                        scaler.update()
                    else:
                        optimizer.step()
                results += *params, optimizer.grad_norm, optimizer.step_was_skipped, optimizer.skipped_steps
                results += saved_numbers(optimizer).values()
        finally:
            torch.set_default_dtype(torch.float32)
    half = len(results) // 2
    assert all_same_bits(results[:half], results[half:])


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [{}, {"state_dtype": I8}, {"lr": torch.tensor(1e-2), "max_norm": 1.0}])
def test_steps_are_the_same_under_another_default_device(target, options):
    ours, plain = network(B16, target.device), network(B16, target.device)
    for model in (ours, plain):
        optimizer = AdamW(model.parameters(), **options)
        for seed in range(2):
            backward(model, seed)
            with torch.device("meta") if model is ours else contextlib.nullcontext():
                optimizer.step()
    assert all(map(same_bits, ours.parameters(), plain.parameters()))


@pytest.mark.exhaustive
def test_a_number_on_the_host_goes_by_value_to_another_device():
    """A copy to the device would make the host wait."""
    model = network()
    backward(model, 0)
    optimizer = AdamW(model.parameters(), lr=torch.tensor(0.5), betas=(0.75, 0.875))
    optimizer.step()
    [plan] = optimizer._plans
    *_, on_device = plan._shared(Verdict(), None, None)[:-7]
    assert [it.numel() for it in on_device] == [1, 0, 0]
    plan.device = torch.device("cuda")
    lr, beta1, beta2, *_, on_device = plan._shared(Verdict(), None, None)[:-7]
    assert (lr, beta1, beta2, on_device) == ([0.5], [0.75], [0.875], [])


STEPS_OF_FAKE_TENSORS = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from mpkernels.optim import AdamW
with FakeTensorMode():
    for dtype in (torch.float32, torch.bfloat16):
        model = torch.nn.Linear(3, 4, dtype=dtype)
        optimizer = AdamW(model.parameters(), max_norm=1.0)
        for _ in range(2):
            model(torch.ones(2, 3, dtype=dtype)).sum().backward()
            optimizer.step()
    del optimizer
    print(model.weight.shape)
"""


@pytest.mark.exhaustive
def test_fake_tensors_can_be_stepped():
    """Tools that estimate memory step fake tensors. A bad free would end the process, so it is a new one."""
    done = subprocess.run([sys.executable, "-c", STEPS_OF_FAKE_TENSORS], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "torch.Size([4, 3])\n"), done.stderr


@pytest.mark.exhaustive
def test_a_learning_rate_may_be_a_16_bit_tensor():
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    AdamW([weight], lr=torch.tensor(0.5, dtype=B16), weight_decay=0.0).step()
    torch.testing.assert_close(weight.detach(), torch.full((3,), 0.5))
