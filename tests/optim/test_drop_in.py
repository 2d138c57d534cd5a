"""AdamW takes the place of torch's: the same calls, the same results."""

import inspect
import pickle

import pytest
import torch

from mpkernels.amp import GradScaler
from mpkernels.optim import AdamW
from tests.networks import B16, assert_close, backward, network
from tests.optim.optimizers import Tuned


def test_inspect_sees_the_written_signature():
    assert list(inspect.signature(AdamW).parameters)[:4] == ["params", "lr", "betas", "eps"]


def test_a_group_may_hold_several_dtypes_and_complex_parameters():
    torch.manual_seed(0)
    params = [torch.randn(5, dtype=dtype) for dtype in (torch.float32, torch.float64, torch.complex64)]
    ours, theirs = ([torch.nn.Parameter(param.clone()) for param in params] for _ in range(2))
    optimizers = AdamW([*ours, torch.nn.Parameter(torch.ones(3, dtype=B16))]), torch.optim.AdamW(theirs, foreach=False)
    for _ in range(5):
        for group, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            sum((param.abs() ** 2).sum() for param in group).backward()
            optimizer.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("differentiable", [False, True])
def test_it_steps_where_it_replaces_torchs_by_name(monkeypatch, differentiable):
    monkeypatch.setattr(torch.optim, "AdamW", AdamW)
    leaf = torch.ones(3, requires_grad=True)
    weight = leaf.clone() if differentiable else leaf
    weight.grad = torch.ones(3)
    torch.optim.AdamW([weight], differentiable=differentiable).step()
    assert (weight < 1).all()


def test_differentiable_steps_are_torchs_and_take_none_of_our_options():
    params = [torch.ones(3, requires_grad=True) for _ in range(2)]
    values = []
    for param, kind in zip(params, (AdamW, torch.optim.AdamW), strict=True):
        weight = param.clone()
        weight.grad = param * 2
        kind([weight], differentiable=True).step()
        values.append(torch.autograd.grad(weight.sum(), param)[0])
    assert torch.equal(*values)
    narrow = torch.ones(3, dtype=B16, requires_grad=True)
    with pytest.raises(ValueError, match=r"^Tuned: differentiable=True takes fp32 parameters alone"):
        Tuned([narrow], differentiable=True)
    optimizer = Tuned([torch.ones(3, requires_grad=True)], differentiable=True)
    with pytest.raises(ValueError, match=r"^Tuned: differentiable=True takes fp32 parameters alone"):
        optimizer.add_param_group({"params": [narrow]})
    assert len(optimizer.param_groups) == 1
    for options, what in (
        ({"max_norm": 1.0}, "max_norm, guard and"),
        ({"guard": True}, "max_norm, guard and"),
        ({"state_dtype": B16}, "max_norm, guard and"),
        ({"offload": True}, "process_group and offload"),
    ):
        with pytest.raises(ValueError, match=f"^Tuned: differentiable=True is torch's own step, without {what}"):
            Tuned([torch.ones(3, requires_grad=True)], differentiable=True, **options)


@pytest.mark.parametrize("scaler_kind", [GradScaler, torch.amp.GradScaler])
def test_differentiable_steps_train_and_skip_under_a_scaler_as_torchs(scaler_kind):
    """torch's step asserts that no scale is handed to it. The optimizer has been through a pickle."""
    ours, theirs = network(), network()
    ours, optimizer = pickle.loads(pickle.dumps((ours, AdamW(ours.parameters(), lr=1e-2, differentiable=True))))
    optimizers = optimizer, torch.optim.AdamW(theirs.parameters(), lr=1e-2, differentiable=True)
    scalers = scaler_kind("cpu", init_scale=1024.0), torch.amp.GradScaler("cpu", init_scale=1024.0)
    for seed in range(4):
        for model, optimizer, scaler in zip((ours, theirs), optimizers, scalers, strict=True):
            backward(model, seed, scale=scaler.scale(torch.ones(())).item())
            if seed == 2:
                model[0].bias.grad[0] = float("inf")
            model.requires_grad_(False)
            scaler.step(optimizer)
            scaler.update()
            model.requires_grad_(True)
    assert scalers[0].get_scale() == scalers[1].get_scale() == 512.0
    assert_close(ours, theirs, 10)
