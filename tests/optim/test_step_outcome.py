"""A step's outcome belongs to one object. Copies, pickles and failed loads keep what users read from it."""

import copy
import pickle

import pytest
import torch

from mpkernels.amp import GradScaler
from mpkernels.optim import AdamW, Masters
from mpkernels.optim.readback import Readback
from tests.networks import B16, backward, network
from tests.optim.optimizers import each_with_masters


def skipped_once():
    model = network(B16)
    optimizer = AdamW(model.parameters(), max_norm=1.0)
    for seed in range(2):
        backward(model, seed)
        model[0].weight.grad[0, 0] *= float("nan") if seed == 0 else 1.0
        optimizer.step()
    return model, optimizer


def shown(optimizer):
    return optimizer.grad_norm.item(), optimizer.skipped_steps.item()


@each_with_masters
def test_nothing_is_shown_before_a_step_and_after_one_without_grads(line):
    optimizer = line.ours(network().parameters(), max_norm=1.0)
    assert (optimizer.grad_norm, optimizer.skipped_steps, optimizer.step_was_skipped) == (None, None, None)
    optimizer.step()
    assert (optimizer.grad_norm, optimizer.skipped_steps, optimizer.step_was_skipped) == (None, None, None)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_copies_show_the_same_outcome_and_count_on_by_themselves(copied):
    model, optimizer = skipped_once()
    twin = copied(optimizer)
    assert shown(twin) == shown(optimizer)
    assert (twin.step_was_skipped, optimizer.step_was_skipped.item()) == (None, False)
    model[0].weight.grad.fill_(float("inf"))
    optimizer.step()
    assert (optimizer.step_was_skipped.item(), twin.step_was_skipped) == (True, None)
    assert twin.grad_norm.isfinite()


def test_a_pickle_holds_norm_and_count():
    _, optimizer = skipped_once()
    state = optimizer.__getstate__()
    assert (state["grad_norm"], state["_skips"]) == shown(optimizer)
    assert not [key for key, it in state.items() if type(it).__module__.startswith("mpkernels")]
    twin = object.__new__(AdamW)
    twin.__setstate__(state)
    assert shown(twin) == shown(optimizer)
    assert "_skips" in state  # the caller's dict is left alone


def test_users_may_set_the_norm_and_the_count():
    model, optimizer = skipped_once()
    optimizer.skipped_steps, optimizer.grad_norm = None, torch.tensor(7.0)
    assert optimizer.grad_norm.item() == 7
    optimizer.step()
    assert (optimizer.skipped_steps.item(), optimizer.grad_norm.item()) == (0, shown(skipped_once()[1])[0])
    model[0].weight.grad.fill_(float("inf"))
    optimizer.skipped_steps = five = torch.tensor(5.0)
    optimizer.step()
    assert (optimizer.skipped_steps.item(), five.item()) == (6, 5)


@pytest.mark.parametrize("make", [AdamW, lambda params: Masters(torch.optim.SGD(params, 0.1), guard=True)])
@pytest.mark.parametrize("kind", [None, GradScaler, torch.amp.GradScaler], ids=["guard", "ours", "torchs"])
def test_a_count_that_was_read_stays_what_it_was(make, kind):
    model = network(B16)
    optimizer, scaler = make(model.parameters()), (kind or torch.amp.GradScaler)("cpu", enabled=kind is not None)
    counts, scalers_counts = [], []
    for factor in (1.0, float("inf"), 1.0, float("inf")):
        optimizer.zero_grad()
        scaler.scale((model(torch.ones(2, 20, dtype=B16)) * factor).float().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        counts.append(optimizer.skipped_steps)
        scalers_counts.append(getattr(scaler, "skipped_steps", None))
    assert counts == [0, 1, 1, 2]
    assert kind is not GradScaler or scalers_counts == [0, 1, 1, 2]


def test_a_load_keeps_the_count_and_forgets_the_last_step():
    _, optimizer = skipped_once()
    before = shown(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    assert (shown(optimizer), optimizer.step_was_skipped) == (before, None)


def test_a_failed_load_leaves_the_outcome_as_it_is():
    _, optimizer = skipped_once()
    before, bad = shown(optimizer), optimizer.state_dict()
    bad["state"] = {0: {"step": torch.ones(()), "exp_avg": torch.ones(2)}}
    with pytest.raises(ValueError, match=r"state\[0\] must have exp_avg and exp_avg_sq"):
        optimizer.load_state_dict(bad)
    assert (shown(optimizer), optimizer.step_was_skipped.item()) == (before, False)


def test_a_skip_by_a_scaler_counts_in_the_optimizer_too():
    model, optimizer = skipped_once()
    scaler = GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    model[0].weight.grad.fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    assert (optimizer.step_was_skipped.item(), optimizer.skipped_steps.item(), scaler.skipped_steps.item()) == (1, 2, 1)


class Event:
    """An event without ``synchronize``, because nothing may wait."""

    def __init__(self):
        self.has_passed = False

    def query(self):
        return self.has_passed


def test_a_readback_gives_the_newest_number_that_has_arrived(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)  # a CPU build can't say
    readback, events = Readback(), [Event() for _ in range(3)]
    readback._on_its_way.extend(zip("abc", events, strict=True))
    assert readback.read() is None
    events[0].has_passed = events[1].has_passed = True
    assert [readback.read(), readback.read()] == ["b", "b"]
    events[2].has_passed = True
    assert readback.read() == "c"
