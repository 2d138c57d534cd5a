"""What docs/migrate.md says of other libraries' checkpoints and options. They are not installed: their states are built
here as their own code writes them."""

import copy

import pytest
import torch

from mpkernels.optim import AdamW
from tests.hard_grads import same_bits
from tests.networks import B16, network, train

GROUP = {"lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "step": 3}


@pytest.fixture
def model():
    return network(B16)


def theirs(model, **beyond):
    """Return a state dict as FusedAdam, Apex's and Transformer Engine's, writes it: the group has the step. ``beyond``
    gives further keys of each parameter's state, each with a function that makes its value of the master."""
    train(model, optimizer := AdamW(model.parameters(), master="fp32"), 3)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"] = [GROUP | {"params": saved["param_groups"][0]["params"]}]
    for number, state in saved["state"].items():
        moments = {key: state[key] for key in ("exp_avg", "exp_avg_sq")}
        saved["state"][number] = moments | {key: make(state["master"]) for key, make in beyond.items()}
    return saved


def test_fused_adam_without_masters_takes_the_weights(model, recwarn):
    saved = theirs(model)
    optimizer = AdamW(model.parameters(), weight_decay=0.1)
    optimizer.load_state_dict(saved)
    before = [param.detach().float() for param in model.parameters()]
    assert optimizer.param_groups[0]["weight_decay"] == 0.0
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, 1)
    for param, weight in zip(model.parameters(), before, strict=True):
        assert optimizer.state[param]["step"] == 4
        assert torch.equal(param.float(), weight)
        assert not optimizer.state[param]["remainder"].any()
    assert not recwarn.list


def test_fused_adam_with_masters_keeps_their_bits(model, recwarn):
    saved = theirs(model, master_param=torch.clone)
    optimizer = AdamW(model.parameters())
    optimizer.load_state_dict(saved)
    for state, their_state in zip(optimizer.state.values(), saved["state"].values(), strict=True):
        assert same_bits(state["exp_avg"], their_state["exp_avg"])
        assert same_bits(state["master"], their_state["master_param"])
    assert not recwarn.list


def test_transformer_engines_remainders_are_rebuilt_from_the_weight(model):
    saved = theirs(model, master_param=lambda master: torch.ones_like(master, dtype=torch.int16))
    optimizer = AdamW(model.parameters())
    with pytest.warns(UserWarning, match="AdamW: master came back as torch.int16, .* rebuilt from the weight"):
        optimizer.load_state_dict(saved)


def test_bitsandbytes_moments_are_refused_before_anything_changes(model):
    saved = theirs(model)
    for state in saved["state"].values():
        state |= {"state1": state.pop("exp_avg"), "state2": state.pop("exp_avg_sq")}
    optimizer = AdamW(model.parameters())
    with pytest.raises(ValueError, match="must have exp_avg and exp_avg_sq, got state1, state2"):
        optimizer.load_state_dict(saved)
    assert not optimizer.state


@pytest.mark.parametrize("option", ["adam_w_mode", "bias_correction", "set_grad_none", "percentile_clipping"])
def test_an_option_without_a_counterpart_is_named(model, option):
    with pytest.raises(TypeError, match=option):
        AdamW(model.parameters(), **{option: False})
