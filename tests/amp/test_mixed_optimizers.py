"""An optimizer passed to to_mixed and to_full: weights become its masters, and masters become weights."""

import copy

import pytest
import torch
from torch.testing import assert_close

from mpkernels.amp import to_full, to_mixed
from mpkernels.ops.step.split import join
from mpkernels.optim import AdamW
from tests.amp.mixed_models import F32
from tests.networks import B16, network, train


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


@pytest.mark.parametrize("master", ["split", "fp32"])
@pytest.mark.parametrize("steps", [0, 2])
def test_an_optimizer_passed_to_to_mixed_gets_the_weights_as_they_were(master, steps):
    model, twin = network(), network()
    optimizers = [AdamW(it.parameters(), lr=1e-3, master=master) for it in (model, twin)]
    for it, optimizer in zip((model, twin), optimizers, strict=True):
        if steps:
            train(it, optimizer, steps)
    to_mixed(model, optimizer=optimizers[0])
    assert model[0].weight.dtype == B16
    to_full(model, optimizers[0])
    assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=0)
    to_mixed(model, optimizer=optimizers[0])
    for seed in range(3):  # no step is lost in rounding
        for param, twin_param in zip(model.parameters(), twin.parameters(), strict=True):
            twin_param.grad = (
                torch.randn(twin_param.shape, generator=torch.Generator().manual_seed(seed)).bfloat16().float()
            )
            param.grad = twin_param.grad.to(param.dtype)
        for optimizer in optimizers:
            optimizer.step()
    to_full(model, optimizers[0])
    assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=0)
    with pytest.raises(TypeError, match=r"optimizer must be one of mpkernels.optim, .* got torch.optim.sgd.SGD"):
        to_mixed(twin, optimizer=torch.optim.SGD(twin.parameters()))
    assert twin[0].weight.dtype == F32


def test_to_full_widens_weights_that_have_no_master():
    model = to_mixed(network())
    model[3].requires_grad_(False)
    rounded = [param.detach().float() for param in model.parameters()]
    to_full(model, AdamW([*model[0].parameters(), *model[2].parameters()]))
    assert_close([param.detach() for param in model.parameters()], rounded, rtol=0, atol=0)
