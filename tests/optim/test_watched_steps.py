"""Hooks and profilers see each step once; a step that nobody watches costs nothing for them."""

from unittest.mock import patch

import pytest
import torch
from torch.optim import optimizer as torchs

from mpkernels.optim import SGD, AdamW, Masters

NAME = "Optimizer.step#"


class Own(AdamW):
    """An AdamW whose step calls AdamW's."""

    def step(self, closure=None):
        return super().step(closure)


def masters(params):
    return Masters(torch.optim.SGD(params, lr=0.1))


KINDS = pytest.mark.parametrize("kind", [AdamW, SGD, Own, masters])


@pytest.fixture(autouse=True)
def no_hooks_of_all_optimizers():
    """Without those that other tests and their libraries have left."""
    before, after = torchs._global_optimizer_pre_hooks, torchs._global_optimizer_post_hooks
    with patch.dict(before, clear=True), patch.dict(after, clear=True):
        yield


@pytest.fixture
def optimizer(kind):
    AdamW([torch.nn.Parameter(torch.ones(1))])  # torch changes a class when it makes the first instance
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    return kind([param])


@KINDS
def test_each_hook_runs_once_around_the_step(optimizer):
    seen, weight = [], optimizer.param_groups[0]["params"][0]

    def note(name):
        return lambda *_: seen.append((name, weight[0].item() == 1))

    torchs.register_optimizer_step_pre_hook(note("before all"))
    torchs.register_optimizer_step_post_hook(note("after all"))
    optimizer.register_step_pre_hook(note("before"))
    optimizer.register_step_post_hook(note("after"))
    optimizer.step()
    own = [("before", True), ("after", False)]
    of_wrapped = [("before all", True), ("after all", False)] if isinstance(optimizer, Masters) else []
    assert seen == [("before all", True), own[0], *of_wrapped, own[1], ("after all", False)]


@KINDS
def test_a_hook_changes_the_arguments(optimizer):
    optimizer.register_step_pre_hook(lambda _, args, kwargs: (args, {"closure": lambda: "from the hook"}))
    assert optimizer.step() == "from the hook"


@KINDS
def test_a_profiler_sees_the_step(optimizer):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    names = [it.name for it in profile.events() if it.name.startswith(NAME)]
    assert names.count(f"{NAME}{type(optimizer).__name__}.step") == 1


@pytest.mark.parametrize("kind", [AdamW, SGD, masters])
def test_a_step_that_nobody_watches_records_nothing(optimizer, monkeypatch):
    recorded = []
    record = torch.autograd.profiler.record_function.__enter__
    monkeypatch.setattr(
        torch.autograd.profiler.record_function, "__enter__", lambda it: recorded.append(it.name) or record(it)
    )
    optimizer.step()
    assert f"{NAME}{type(optimizer).__name__}.step" not in recorded
    optimizer.register_step_post_hook(lambda *_: None)
    optimizer.step()
    assert f"{NAME}{type(optimizer).__name__}.step" in recorded


def test_each_option_of_a_group_takes_effect_at_the_next_step():
    changes = {"lr": 0.3, "betas": (0.5, 0.6), "eps": 1e-2, "weight_decay": 0.4, "maximize": True}
    both = []
    for kind in (AdamW, torch.optim.AdamW):
        params = [torch.nn.Parameter(torch.linspace(-2, 2, 5)) for _ in range(2)]
        optimizer = kind([{"params": [it]} for it in params])
        for key, value in [(None, None), *changes.items(), ("maximize", False)]:
            optimizer.param_groups[1].update({key: value} if key else {})
            for param in params:
                param.grad = torch.linspace(-1, 3, 5)
            optimizer.step()
        both.append([it.detach() for it in params])
    torch.testing.assert_close(*both, rtol=1e-5, atol=1e-6)
