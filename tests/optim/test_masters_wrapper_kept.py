"""Masters stays whole through checkpoints and errors, and leaves alone what is the user's."""

import copy
import gc
import os
import signal
import threading
import weakref

import pytest
import torch

from mpkernels.optim import Masters, wide_weights
from mpkernels.optim.masters import true_weight
from tests.hard_grads import same_bits
from tests.networks import B16
from tests.optim.test_masters_wrapper_use import around, step
from tests.optim.wrapped import all_params, give_grads


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
    with pytest.raises(ValueError, match="state_dict must have state and param_groups, got an empty dict"):
        optimizer.load_state_dict({})
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


class Interrupted(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_waits_until_the_weights_are_rounded():
    optimizer = around(Interrupted)
    params, before = all_params(optimizer), [it.detach().clone() for it in all_params(optimizer)]
    with pytest.raises(KeyboardInterrupt):
        step(optimizer)
    assert all(it is other for it, other in zip(all_params(optimizer), params, strict=True))
    assert not any(map(torch.equal, params, before))
    assert all("remainder" in optimizer.state[param] for param in params[:3])


def test_an_error_before_the_wrapped_step_loses_no_remainder(monkeypatch):
    optimizer, calls = around(momentum=0.9), []
    step(optimizer)
    remainders = [optimizer.state[it]["remainder"].clone() for it in all_params(optimizer)[:3]]
    placed_as = wide_weights.placed_as

    def fail_at_the_second(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise MemoryError
        return placed_as(*arguments)

    monkeypatch.setattr(wide_weights, "placed_as", fail_at_the_second)
    give_grads(all_params(optimizer), 1, B16)
    with pytest.raises(MemoryError):
        optimizer.step()
    assert all(map(torch.equal, (optimizer.state[it]["remainder"] for it in all_params(optimizer)[:3]), remainders))
    step(optimizer, 2)


def test_notes_that_users_have_made_stay_as_they_are():
    buffer = torch.zeros(6, dtype=B16)
    param = torch.nn.Parameter(torch.ones(6, dtype=B16))
    param.view, param.scale = buffer.view(6), torch.nn.Parameter(torch.ones(6, dtype=B16))
    view, scale = param.view, param.scale
    Masters(torch.optim.SGD([param], lr=0.1))
    assert param.view is view
    assert param.scale is scale


def test_what_is_kept_of_a_parameter_goes_with_it():
    optimizer, alive = Masters(torch.optim.SGD([torch.nn.Parameter(torch.ones(3, dtype=B16))], lr=0.1)), []
    for _ in range(4):
        param = torch.nn.Parameter(torch.ones(3, dtype=B16))
        param.grad = torch.ones_like(param)
        optimizer.param_groups[0]["params"] = [param]
        optimizer.step()
        optimizer.state.pop(param)
        alive.append(weakref.ref(param))
    gc.collect()
    assert [it() is not None for it in alive] == [False, False, False, True]


def test_a_copy_before_the_first_step_takes_no_fp32_memory():
    copied = copy.deepcopy(around())
    shown = list(copied._wide_weights._wide_of.values())
    assert [it.untyped_storage().nbytes() for it in shown] == [0] * 3


def test_parameters_without_memory_have_no_common_address():
    Masters(torch.optim.SGD([torch.nn.Parameter(torch.ones(3, dtype=B16, device="meta"))], lr=0.1))


@pytest.mark.parametrize("error", [TypeError, KeyboardInterrupt])
def test_a_group_that_fails_is_not_kept(monkeypatch, error):
    optimizer = around()

    def fail(*_):
        raise error

    monkeypatch.setattr(wide_weights.WideWeights, "cover", fail)
    with pytest.raises(error):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3, dtype=B16))]})
    assert len(optimizer.param_groups) == 2


class HoldingALock(torch.optim.SGD):
    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.lock, self.notes = threading.Lock(), []


def test_a_trial_step_leaves_out_what_cannot_be_copied_and_hooks():
    empty = torch.nn.Parameter(torch.ones(3, dtype=B16))
    sgd, calls = HoldingALock([{"params": []}, {"params": [empty]}], lr=0.1), []
    sgd.register_step_pre_hook(lambda *_: calls.append(1))
    sgd.register_state_dict_post_hook(lambda *_: calls.append(2))
    Masters(sgd, group_by_group=True)
    assert calls == []
