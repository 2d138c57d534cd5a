"""Layers under torch.utils.checkpoint, which runs their forward again in the backward."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from mpkernels import nn as ours
from mpkernels.amp import autocast, to_mixed
from tests.networks import B16, F16, one_thread

__all__ = ["one_thread"]  # a fixture that each test uses


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        ours.LinearAct(16, 32, activation="gelu"), nn.Dropout(0.2), ours.LinearAct(32, 16, activation="none")
    )


def grads(model, run, dtype, outside):
    """Return the grads. With ``outside``, autocast surrounds the checkpoint; else it is in the code that runs twice."""
    torch.manual_seed(1)
    inputs = torch.linspace(-1, 1, 128).view(8, 16).requires_grad_()

    def body(x):
        with autocast("cpu", dtype=dtype, enabled=dtype is not None and not outside):
            return model(x)

    with autocast("cpu", dtype=dtype, enabled=dtype is not None and outside):
        out = run(model if outside else body, inputs)
    out.float().square().mean().backward()
    return [inputs.grad, *(param.grad for param in model.parameters())]


@pytest.mark.parametrize("dtype", [None, B16, F16], ids=str)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("outside", [True, False])
def test_grads_are_those_without_a_checkpoint(dtype, reentrant, outside):
    plain = grads(model(), lambda f, x: f(x), dtype, outside)
    again = grads(model(), lambda f, x: checkpoint(f, x, use_reentrant=reentrant), dtype, outside)
    assert_close(again, plain, rtol=0, atol=0)


@pytest.mark.parametrize("reentrant", [True, False])
def test_grads_of_a_mixed_model_are_those_without_a_checkpoint(reentrant):
    plain = grads(to_mixed(model()), lambda f, x: f(x), None, True)
    again = grads(to_mixed(model()), lambda f, x: checkpoint(f, x, use_reentrant=reentrant), None, True)
    assert_close(again, plain, rtol=0, atol=0)
    assert again[1].dtype == B16
