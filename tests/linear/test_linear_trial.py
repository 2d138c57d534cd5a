"""What the selector compares finds kernels that are wrong, and none that are right."""

import pytest
import torch

from mpkernels import selector
from mpkernels.functional import linear_act
from mpkernels.linear import paths
from mpkernels.linear.trial import LinearTrial
from mpkernels.selector import disk
from mpkernels.selector.trial import first_off
from tests.linear_cases import TORCH
from tests.networks import B16, F16

F32 = torch.float32
DTYPES = [(F32, None), (B16, None), (F16, None), (F32, B16), (F32, F16)]  # the tensors', autocast's
SIZES = [(1, 1, 1), (4, 1, 3), (8, 16, 1), (2, 3, 5), (64, 33, 70), (130, 64, 96)]


def trial_of(rows, features, outputs, dtype=B16, autocast=None, activation="gelu", trains=True, has_bias=True):
    shapes = [(3, features), (outputs, features), (outputs,)][: 2 + has_bias]
    leaves = [torch.empty(shape, dtype=dtype) for shape in shapes]
    return LinearTrial(rows, leaves, activation, trains, autocast)


def off(trial, results):
    return first_off(trial.errors(results), trial.errors(trial.run("torch")), trial.dtype)


@pytest.mark.parametrize("activation", TORCH)
@pytest.mark.parametrize(("dtype", "autocast"), DTYPES, ids=str)
def test_a_right_kernel_passes_whatever_the_size(dtype, autocast, activation):
    """Also where an output is a single number, or little is left of a sum."""
    for i, size in enumerate(SIZES):
        trial = trial_of(*size, dtype, autocast, activation, trains=i != 4, has_bias=i != 5)
        assert off(trial, trial.run("native")) is None, size


def scaled(it):
    return it * 1.02


def with_a_nan(it):
    it.view(-1)[-1] = torch.nan
    return it


def without_the_last(it):
    """A ragged edge that nobody wrote to."""
    it[-1:] = 0
    return it


@pytest.mark.parametrize("place", range(4), ids=["y", "dx", "dweight", "dbias"])
@pytest.mark.parametrize("spoil", [scaled, with_a_nan, without_the_last])
@pytest.mark.parametrize("activation", ["gelu", "relu", "tanh"])
def test_a_wrong_result_is_found(spoil, place, activation):
    trial = trial_of(1024, 33, 70, activation=activation)
    results = trial.run("native")
    results[place] = spoil(results[place].clone())
    assert off(trial, results) is not None


@pytest.fixture
def afresh(monkeypatch, tmp_path):
    for name, value in (("_is_deterministic", False), ("_known", {}), ("by_key", {})):
        monkeypatch.setattr(selector, name, value)
    monkeypatch.setattr(disk, "path", lambda: tmp_path / "choices.json")
    disk._read.cache_clear()
    yield
    disk._read.cache_clear()


def test_a_call_is_not_computed_by_a_kernel_that_is_wrong(afresh, monkeypatch):
    compute = paths.compute

    def compute_wrong(kernel, *arguments):
        return compute(kernel, *arguments) * (1.1 if kernel == "native" else 1)

    monkeypatch.setattr(paths, "compute", compute_wrong)
    x, weight = torch.randn(5, 8), torch.randn(6, 8)
    with pytest.warns(RuntimeWarning, match="the native kernel is left out of .*: its result is off"):
        y = linear_act(x, weight)
    assert torch.equal(y, torch.nn.functional.gelu(torch.nn.functional.linear(x, weight)))
    [chosen] = selector.choices().values()
    assert chosen.startswith("torch; without native: its result is off by ")


def test_a_result_of_another_shape_is_wrong(afresh, monkeypatch):
    run = LinearTrial.run
    monkeypatch.setattr(LinearTrial, "run", lambda self, name: run(self, name)[: 1 if name == "native" else None])
    weight = torch.randn(6, 8, requires_grad=True)
    with pytest.warns(RuntimeWarning, match="the native kernel is left out"):
        linear_act(torch.randn(5, 8), weight)


def test_a_trial_draws_none_of_the_random_numbers(afresh):
    state = torch.get_rng_state()
    linear_act(torch.ones(5, 8), torch.ones(6, 8))
    assert torch.equal(state, torch.get_rng_state())
    assert len(selector.choices()) == 1
