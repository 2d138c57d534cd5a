"""The calls that mpkernels.tune times."""

import pytest
import torch

from mpkernels.linear.trial import Trial
from mpkernels.ops.linear.block_kind import Kind, Parameters
from tests.linear_cases import transposed


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("trains", [True, False])
def test_timed_tensors_have_the_strides_of_the_calls_tensors(trains, autocast):
    """GPT-2 keeps its weights transposed."""
    weight, x = transposed(torch.empty(24, 16)).requires_grad_(), transposed(torch.empty(8, 16))
    trial = Trial(8, Kind("linear_act", "gelu"), x, Parameters(weight, None), trains, autocast)
    assert trial._x.stride() == (1, 8)
    assert trial._params.weight.stride() == (1, 24)
    for name in ("native", "torch"):
        results = trial.run(name)
        assert [it.shape for it in results] == [(8, 24), *[(24, 16)] * trains]
        assert [it.dtype for it in results] == [autocast or torch.float32, *[torch.float32] * trains]
        assert all(0.01 < it.square().mean() < 100 for it in results)  # numbers that 16 bits can hold


def test_a_cpu_times_no_more_rows_than_tell_something():
    x, weight = torch.empty(3, 2048), torch.empty(4096, 2048)
    trial = Trial(2**20, Kind("linear_act", "gelu"), x, Parameters(weight, None), False, None)
    assert len(trial.run("torch")[0]) == 512  # 2^33 operations


def test_a_trial_leaves_the_random_state_alone():
    state = torch.get_rng_state()
    Trial(5, Kind("linear_act", "gelu"), torch.empty(5, 8), Parameters(torch.empty(6, 8), None), True, None).run(
        "torch"
    )
    assert torch.equal(state, torch.get_rng_state())
