"""A checkpoint is loaded completely or not at all, wherever a fault comes."""

import copy
import gc
import weakref
from itertools import count

import pytest
import torch

from mpkernels.optim import AdamW
from tests.faults import faults
from tests.networks import B16

pytestmark = [pytest.mark.exhaustive, pytest.mark.begins_first]
OPTIONS = [{"master": "split"}, {"master": "fp32", "amsgrad": True}, {"state_dtype": torch.int8}]


def trained(steps, **options):
    """Return an optimizer whose weights don't move, so that the masters of any checkpoint fit them."""
    weights = [torch.nn.Parameter(torch.linspace(-1, 1, 3, dtype=dtype)) for dtype in (B16, torch.float32)]
    optimizer = AdamW([{"params": [weight]} for weight in weights], lr=0.0, **options)
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
    return optimizer


def plain(value):
    return (str(value.dtype), value.tolist()) if isinstance(value, torch.Tensor) else value


def facts_of(optimizer):
    """Return all state that an optimizer would train with."""
    groups = [{**group, "params": len(group["params"])} for group in optimizer.param_groups]
    states = [optimizer.state.get(param, {}) for group in optimizer.param_groups for param in group["params"]]
    return groups, [{key: plain(value) for key, value in state.items()} for state in states], optimizer._is_loaded


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # Python drops errors in a generator's end
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_fault_leaves_all_as_it_was_or_all_loaded(options):
    """A second try then loads the checkpoint."""
    saved = trained(3, eps=0.5, **options).state_dict()
    (done := trained(1, **options)).load_state_dict(copy.deepcopy(saved))
    old, new, seen = facts_of(trained(1, **options)), facts_of(done), []
    for number, fault in zip(count(), faults()):
        optimizer = trained(1, **options)
        kept = dict(vars(optimizer))
        with fault:
            optimizer.load_state_dict(saved)
        found = facts_of(optimizer)
        assert found in (old, new), number
        seen.append(found)
        optimizer.load_state_dict(saved)
        assert facts_of(optimizer) == new, number
        optimizer.step()
        kept.clear()
    assert number > 300
    assert old in seen
    assert new in seen[:-1]


@pytest.fixture
def without_gc():
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("is_refused", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_loaded_tensors_are_freed_with_the_state_that_holds_them(without_gc, options, is_refused):
    """They don't wait until Python looks for cycles: a checkpoint may be most of the memory."""
    optimizer, saved = trained(1, **options), copy.deepcopy(trained(3, **options).state_dict())
    if is_refused:
        del saved["state"][1]["exp_avg"]
    loaded = [weakref.ref(saved["state"][number]["exp_avg_sq"]) for number in (0, 1)]
    try:
        optimizer.load_state_dict(saved)
    except ValueError:
        assert is_refused
    optimizer.state.clear()
    del saved
    assert [it() for it in loaded] == [None, None]
