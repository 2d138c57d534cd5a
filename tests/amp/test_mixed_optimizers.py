"""An optimizer passed to to_mixed and to_full: weights become its masters, and masters become weights."""

import copy

import pytest
import torch
from torch.testing import assert_close

from mpkernels.amp import to_full, to_mixed
from mpkernels.ops.step.split import join
from mpkernels.optim import AdamW
from tests.networks import network, train


@pytest.mark.parametrize("master", ["split", "fp32"])
def test_after_to_full_the_optimizer_goes_on_in_fp32(master):
    """After three steps in 16 bits, three steps in fp32 equal torch's steps from the same weights and moments."""
    model = to_mixed(network())
    ours = AdamW(model.parameters(), lr=1e-3, master=master)
    train(model, ours, 3)
    state = ours.state[model[0].weight]
    weight = state["master"].clone() if master == "fp32" else join(model[0].weight.detach(), state["remainder"])
    to_full(model, ours)
    assert torch.equal(model[0].weight, weight)
    assert not torch.equal(weight, weight.bfloat16().float())
    twin = copy.deepcopy(model)
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-3)
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    train(model, ours, 3)
    train(twin, theirs, 3)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close(a, b, rtol=1e-6, atol=1e-6)
    to_mixed(model)  # back again: the next step makes new masters
    train(model, AdamW(model.parameters()), 1)


def test_to_full_widens_weights_that_have_no_master():
    model = to_mixed(network())
    model[3].requires_grad_(False)
    rounded = [param.detach().float() for param in model.parameters()]
    to_full(model, AdamW([*model[0].parameters(), *model[2].parameters()]))
    assert_close([param.detach() for param in model.parameters()], rounded, rtol=0, atol=0)


def test_to_full_names_what_is_no_model():
    model = to_mixed(network())
    with pytest.raises(TypeError, match=r"^to_full: model must be a torch.nn.Module, got AdamW$"):
        to_full(AdamW(model.parameters()), model)
