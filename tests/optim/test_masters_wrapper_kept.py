"""Masters keeps its state through copies, checkpoints, files and errors, and follows writes to weights."""

import copy
import pickle

import pytest
import torch

from mpkernels import checkpoint
from mpkernels.optim import AdamW, Masters
from mpkernels.optim.masters import true_weight
from tests.hard_grads import same_bits
from tests.networks import B16, F16, network, train
from tests.optim.test_masters_wrapper_use import around, step
from tests.optim.wrapped import all_params, give_grads, groups, parameters


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))], ids=["copy", "pickle"]
)
def test_a_copy_steps_as_the_original_does(duplicate):
    optimizer = around(momentum=0.9, max_norm=1.0)
    step(optimizer)
    other = duplicate(optimizer)
    for it in (optimizer, other):
        step(it, 1)
    for param, twin in zip(all_params(optimizer), all_params(other), strict=True):
        assert param is not twin
        assert same_bits(param, twin)
        assert all(map(same_bits, optimizer.state[param].values(), other.state[twin].values()))
    assert other.max_norm == 1.0
    assert other.grad_norm == optimizer.grad_norm


@pytest.mark.parametrize("dtype", [B16, F16], ids=str)
def test_masters_that_were_loaded_into_an_fp32_model_are_used_once_it_is_converted(dtype):
    model, other = network(dtype), network(seed=7)
    optimizer, again = (Masters(torch.optim.AdamW(it.parameters(), lr=1e-2)) for it in (model, other))
    train(model, optimizer, 3)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other.load_state_dict(model.state_dict())
    other.to(dtype)
    again.param_groups[0] |= {"lr": 0.0, "weight_decay": 0.0}
    train(other, again, 1)
    for param, twin in zip(model.parameters(), other.parameters(), strict=True):
        assert same_bits(true_weight(param, optimizer.state[param]), true_weight(twin, again.state[twin]))


@pytest.mark.parametrize("dtype", [B16, F16], ids=str)
def test_a_write_to_a_weight_wins_over_its_master(dtype):
    optimizer = around(dtype=dtype)
    for seed in range(3):
        step(optimizer, seed, dtype)
    param = all_params(optimizer)[0]
    param.data.fill_(3.0)
    optimizer.param_groups[0]["lr"] = 0.0
    step(optimizer, 3, dtype)
    assert (param == 3.0).all()


def test_an_error_in_the_wrapped_step_leaves_groups_and_masters_in_place():
    class Failing(torch.optim.SGD):
        fails = False

        def step(self, closure=None):
            super().step(closure)
            if self.fails:
                raise RuntimeError("no more")

    optimizer = around(Failing, momentum=0.9, max_norm=0.1)
    step(optimizer)
    params, lists = all_params(optimizer), [group["params"] for group in optimizer.param_groups]
    Failing.fails = True
    give_grads(params, 1, B16)
    grads = [param.grad for param in params]
    with pytest.raises(RuntimeError, match="no more"):
        optimizer.step()
    assert all(it is other for it, other in zip(all_params(optimizer), params, strict=True))
    assert all(group["params"] is it for group, it in zip(optimizer.param_groups, lists, strict=True))
    assert all(param.grad is grad for param, grad in zip(params, grads, strict=True))
    assert set(optimizer.state) == set(params)
    assert all("remainder" in optimizer.state[param] for param in params[:3])


def test_a_load_that_fails_leaves_all_as_it_was():
    optimizer = around(momentum=0.9)
    step(optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    saved = copy.deepcopy(before)
    saved["state"][0]["remainder"] = torch.zeros(2, dtype=B16)
    with pytest.raises(
        ValueError, match=r"Masters.load_state_dict: state\[0\]\['remainder'\] must have its parameter's"
    ):
        optimizer.load_state_dict(saved)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({**before, "param_groups": before["param_groups"][:1]})
    for number, state in optimizer.state_dict()["state"].items():
        assert all(map(same_bits, state.values(), before["state"][number].values()))
    step(optimizer, 1)


def test_states_that_the_wrapped_optimizer_loads_are_widened():
    """torch's load_state_dict rounds states to the parameter's dtype, which can't be undone; remainders stay."""
    optimizer = around(momentum=0.9)
    step(optimizer)
    weights = [true_weight(param, optimizer.state[param]).clone() for param in all_params(optimizer)]
    optimizer.wrapped.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 0.0
    step(optimizer, 1)
    for param, weight in zip(all_params(optimizer), weights, strict=True):
        assert optimizer.state[param]["momentum_buffer"].dtype == torch.float32
        assert same_bits(true_weight(param, optimizer.state[param]), weight)


@pytest.mark.parametrize("master", ["split", "fp32"])
def test_checkpoints_go_between_our_adamw_and_masters_around_torchs(master):
    ours, other = AdamW(groups(parameters(B16)), master=master), Masters(torch.optim.AdamW(groups(parameters(B16))))
    for seed in range(3):
        step(ours, seed)
    for param, twin in zip(all_params(ours), all_params(other), strict=True):
        twin.data.copy_(param)
    other.load_state_dict(copy.deepcopy(ours.state_dict()))
    again = AdamW(groups(parameters(B16)))
    again.load_state_dict(copy.deepcopy(other.state_dict()))
    for optimizer in (ours, again, other):
        for param, twin in zip(all_params(ours), all_params(optimizer), strict=True):
            twin.data.copy_(param)
        for group in optimizer.param_groups:
            group |= {"lr": 0.0, "weight_decay": 0.0}
        step(optimizer, 3)
    for param, twin, third in zip(all_params(ours), all_params(other), all_params(again), strict=True):
        weights = [
            true_weight(it, optimizer.state[it]) for it, optimizer in ((param, ours), (twin, other), (third, again))
        ]
        assert same_bits(weights[0], weights[1])
        assert same_bits(weights[0], weights[2])


def test_weights_that_loaded_masters_were_not_made_for_win_with_one_warning():
    ours, other = (
        AdamW(groups(parameters(B16)), master="fp32"),
        Masters(torch.optim.AdamW(groups(parameters(B16)), lr=0.0)),
    )
    step(ours)
    other.load_state_dict(copy.deepcopy(ours.state_dict()))
    for group in other.param_groups:
        group |= {"lr": 0.0, "weight_decay": 0.0}
    before = [param.detach().clone() for param in all_params(other)]  # they differ from those of ``ours``
    with pytest.warns(
        UserWarning, match="3 parameters are not the weights that the loaded masters were made for"
    ) as caught:
        step(other, 1)
    assert len(caught) == 1
    step(other, 2)
    assert all(map(torch.equal, all_params(other), before))


def test_a_model_that_turns_fp32_loses_its_remainders():
    model = network(B16)
    optimizer = Masters(torch.optim.Adam(model.parameters()))
    train(model, optimizer, 2)
    model.float()
    train(model, optimizer, 2)
    assert not any("remainder" in optimizer.state[param] for param in model.parameters())


def test_training_from_a_file_goes_on_with_the_same_bits(tmp_path):
    model = network(B16)
    optimizer = Masters(torch.optim.Adam(model.parameters()))
    train(model, optimizer, 2)
    checkpoint.save(tmp_path / "last.pt", model=model, optimizer=optimizer)
    again = network(B16, seed=7)
    resumed = Masters(torch.optim.Adam(again.parameters()))
    checkpoint.load(tmp_path / "last.pt", model=again, optimizer=resumed)
    for it in ((model, optimizer), (again, resumed)):
        train(*it, 2, first=2)
    for param, twin in zip(model.parameters(), again.parameters(), strict=True):
        assert same_bits(true_weight(param, optimizer.state[param]), true_weight(twin, resumed.state[twin]))
