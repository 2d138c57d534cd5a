"""Statements of docs/differences.md that no other test checks."""

import gc
import weakref

import pytest
import torch
from torch.jit.frontend import NotSupportedError

from mpkernels.functional import linear_act
from mpkernels.nn import LinearAct
from mpkernels.optim import AdamW
from tests.networks import backward, network, one_thread

__all__ = ["one_thread"]  # a fixture that each test uses


def test_a_state_that_was_replaced_is_freed_with_the_next_step(target):
    model = network(device=target.device)
    optimizer = AdamW(model.parameters())
    backward(model, 0)
    optimizer.step()
    state = optimizer.state[model[0].weight]
    old = weakref.ref(state["exp_avg"])
    state["exp_avg"] = state["exp_avg"].clone()
    backward(model, 1)
    optimizer.step()
    gc.collect()
    assert old() is None


def scripted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return linear_act(x, weight)


@pytest.mark.parametrize("layer", [LinearAct(4, 4), scripted], ids=["LinearAct", "linear_act"])
def test_torch_jit_script_refuses_ours(layer):
    with pytest.raises((RuntimeError, NotSupportedError, AssertionError)):  # whichever torch runs into first
        torch.jit.script(layer)
