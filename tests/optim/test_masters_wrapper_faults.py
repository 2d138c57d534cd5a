"""Masters stays whole where a step breaks off, and leaves alone what is the user's."""

import copy
import gc
import os
import signal
import threading
import weakref

import pytest
import torch

from mpkernels.optim import Masters, wide_weights
from tests.networks import B16
from tests.optim.test_masters_wrapper_use import around, step
from tests.optim.wrapped import all_params, give_grads


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


def test_a_step_without_grads_has_nothing_to_tell():
    optimizer = around(max_norm=1.0)
    optimizer.step()
    assert (optimizer.grad_norm, optimizer.step_was_skipped, optimizer.skipped_steps) == (None, None, None)


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
