"""mpkernels.tune's comparison rejects wrong kernels, and accepts right ones."""

import pytest
import torch

from mpkernels.linear.trial import Trial
from mpkernels.ops.linear.block_kind import Kind, Parameters
from mpkernels.selector.timing import first_off, time_ways
from tests.linear_cases import TORCH, transposed
from tests.networks import B16, F16

F32 = torch.float32
DTYPES = [(F32, None), (B16, None), (F16, None), (F32, B16), (F32, F16)]  # of tensors, of autocast
SIZES = [(1, 1, 1), (4, 1, 3), (8, 16, 1), (2, 3, 5), (64, 33, 70), (130, 64, 96)]


def trial_of(rows, features, outputs, dtype=B16, autocast=None, activation="gelu", trains=True, has_bias=True):
    x, weight, bias = (torch.empty(it, dtype=dtype) for it in ((3, features), (outputs, features), (outputs,)))
    parameters = Parameters(weight.requires_grad_(), bias.requires_grad_() if has_bias else None)
    return Trial(rows, Kind("linear_act", activation), x.requires_grad_(), parameters, trains, autocast)


def error_of(trial, results):
    """Return the first error that is too large, or None."""
    return first_off(trial.errors(results), trial.errors(trial.run("torch")), trial.dtype)


@pytest.mark.parametrize("activation", TORCH)
@pytest.mark.parametrize(("dtype", "autocast"), DTYPES, ids=str)
def test_a_right_kernel_passes_whatever_the_size(dtype, autocast, activation):
    """Some sizes give a single number, or sums that nearly cancel."""
    for i, size in enumerate(SIZES):
        trial = trial_of(*size, dtype, autocast, activation, trains=i != 4, has_bias=i != 5)
        assert error_of(trial, trial.run("native")) is None, size


def scaled(it):
    return it * 1.02


def with_a_nan(it):
    it.view(-1)[-1] = torch.nan
    return it


def without_the_last(it):
    """Spoil a result like a kernel that leaves the last, ragged tile unwritten."""
    it[-1:] = 0
    return it


@pytest.mark.parametrize("place", range(4), ids=["y", "dx", "dweight", "dbias"])
@pytest.mark.parametrize("spoil", [scaled, with_a_nan, without_the_last])
@pytest.mark.parametrize("activation", ["gelu", "relu", "tanh"])
def test_a_wrong_result_is_found(spoil, place, activation):
    trial = trial_of(1024, 33, 70, activation=activation)
    results = trial.run("native")
    results[place] = spoil(results[place].clone())
    assert error_of(trial, results) is not None


def test_a_wrong_kernel_is_left_out(monkeypatch):
    run = Trial.run
    for spoil in (lambda it: [1.1 * it[0], *it[1:]], lambda it: it[:1]):  # the second returns too few results
        ways = {"native": spoil, "torch": list}
        monkeypatch.setattr(Trial, "run", lambda self, name, ways=ways: ways[name](run(self, name)))
        timed = time_ways(trial_of(64, 8, 6), ("native", "torch"), torch.device("cpu"))
        assert [*timed.seconds] == ["torch"]
        assert [*timed.left_out] == ["native"]
        assert timed.best == "torch"


def test_with_a_dropout_only_an_inf_or_nan_is_wrong():
    """Results with a dropout can't be compared, because each call drops other elements."""
    x, weight, out_weight = (torch.empty(it) for it in ((3, 8), (6, 8), (8, 6)))
    params = Parameters(weight, None, None, None, out_weight, None)
    trial = Trial(64, Kind("mlp", "gelu", False, False, 0.5), x, params, False, None)
    results = trial.run("native")
    assert error_of(trial, results) is None
    assert error_of(trial, [with_a_nan(results[0])]) is not None


@pytest.mark.parametrize("trains", [True, False])
def test_timed_tensors_have_the_strides_of_the_calls_tensors(trains):
    """GPT-2 keeps its weights transposed."""
    weight = transposed(torch.empty(24, 16)).requires_grad_()
    trial = Trial(8, Kind("linear_act", "gelu"), transposed(torch.empty(8, 16)), Parameters(weight, None), trains, None)
    assert trial._x.stride() == (1, 8)
    assert trial._params.weight.stride() == (1, 24)
    assert [it.shape for it in trial.run("native")] == [(8, 24), *[(24, 16)] * trains]


def test_a_trial_leaves_the_random_state_alone():
    state = torch.get_rng_state()
    trial = trial_of(5, 8, 6)
    trial.errors(trial.run("torch"))
    assert torch.equal(state, torch.get_rng_state())
