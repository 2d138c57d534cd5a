"""AdamW steps alike for any default dtype and device, with numbers anywhere, and with tensors without memory."""

import contextlib
import subprocess
import sys

import pytest
import torch

from mpkernels.optim import AdamW
from tests.hard_grads import same_bits
from tests.networks import B16, backward, network

pytestmark = pytest.mark.exhaustive

I8 = torch.int8


@pytest.mark.parametrize("dtype", [B16, torch.float64], ids=str)
def test_steps_are_the_same_under_another_default_dtype(target, dtype):
    """None of our tensors takes the default dtype."""
    results = []
    for default in (torch.float32, dtype):
        models = [network(it, target.device) for it in (torch.float32, B16)]
        try:
            torch.set_default_dtype(default)
            for state_dtype in (torch.float32, I8):
                params = [param for model in models for param in model.parameters()]
                optimizer = AdamW(params, lr=1e-2, max_norm=1.0, state_dtype=state_dtype)
                generator = torch.Generator().manual_seed(0)
                for _ in range(2):
                    for param in params:
                        param.grad = torch.randn(param.shape, generator=generator, dtype=torch.float32).to(param)
                    optimizer.step()
            results.append((params, optimizer.grad_norm, optimizer.step_was_skipped, optimizer.skipped_steps))
        finally:
            torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(*results, rtol=0, atol=0)


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


def test_a_number_on_the_host_goes_by_value_to_another_device():
    """A copy to the device would make the host wait."""
    model = network()
    backward(model, 0)
    optimizer = AdamW(model.parameters(), lr=torch.tensor(0.5), betas=(0.75, 0.875))
    optimizer.step()
    [plan] = optimizer._plans
    *_, on_device = plan._hyperparameters()
    assert [it.numel() for it in on_device] == [1, 0, 0]
    plan.device = torch.device("cuda")
    lr, beta1, beta2, *_, on_device = plan._hyperparameters()
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


def test_fake_tensors_can_be_stepped():
    """Tools that estimate memory step fake tensors. A bad free would end the process, so it is a new one."""
    done = subprocess.run([sys.executable, "-c", STEPS_OF_FAKE_TENSORS], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "torch.Size([4, 3])\n"), done.stderr


def test_a_learning_rate_may_be_a_16_bit_tensor():
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    AdamW([weight], lr=torch.tensor(0.5, dtype=B16), weight_decay=0.0).step()
    torch.testing.assert_close(weight.detach(), torch.full((3,), 0.5))
