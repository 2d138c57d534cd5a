import copy
import pickle

import pytest
import torch

from mpkernels import nn
from tests.linear import TORCH


def both(**keywords):
    layers = []
    for make in (torch.nn.Linear, nn.LinearAct):
        torch.manual_seed(3)
        layers.append(make(7, 5, **keywords))
    return layers


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64], ids=str)
def test_parameters_are_linears(bias, dtype):
    """The same numbers from the same seed, and each loads the other's checkpoint."""
    theirs, ours = both(bias=bias, dtype=dtype)
    assert isinstance(ours, torch.nn.Linear)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for mine, torchs_own in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, torchs_own)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())


@pytest.mark.parametrize("activation", TORCH)
def test_forward_is_linear_and_activation(target, activation):
    theirs, _ = both()
    ours = nn.LinearAct(7, 5, activation=activation)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 7, device=target.device)
    torch.testing.assert_close(ours.to(target.device)(x), TORCH[activation](theirs.to(target.device)(x)))


def test_device():
    assert nn.LinearAct(7, 5, device="meta").weight.is_meta


def test_repr():
    text = "LinearAct(in_features=7, out_features=5, bias=True, activation='gelu')"
    assert repr(nn.LinearAct(7, 5)) == text


def test_an_unknown_activation_is_refused_at_once():
    with pytest.raises(ValueError, match=r"^LinearAct: activation must be one of none, relu, .*, got 'swish'$"):
        nn.LinearAct(7, 5, activation="swish")


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies(clone):
    layer = nn.LinearAct(7, 5, activation="silu")
    x = torch.randn(3, 7)
    assert torch.equal(clone(layer)(x), layer(x))


def test_it_learns():
    torch.manual_seed(0)
    model = torch.nn.Sequential(nn.LinearAct(4, 32), nn.LinearAct(32, 1, activation="none"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(256, 4)
    target = x.square().sum(1, keepdim=True)
    losses = []
    for _ in range(200):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = (model(x).float() - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 20
