"""update_scale_: the scale moves as in torch, with bounds, hysteresis and counts of overflows."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpkernels.ops import update_scale_
from tests.hard_grads import same_bits

INF, NAN = math.inf, math.nan
SCALES = (0.0, -0.0, 1e-45, 2.0**-130, 1 / 3, 1.0, 65536.0, 2.0**127, 3.4e38, INF, NAN)


class State:
    def __init__(self, scale, tracker=0, overflows=(0, 0), device="cpu"):
        self.scale = torch.tensor(scale, dtype=torch.float32, device=device)
        self.tracker = torch.tensor(tracker, dtype=torch.int32, device=device)
        self.overflows = torch.tensor(overflows, dtype=torch.int32, device=device)

    def update(self, found_inf, factors=(2.0, 0.5, 3), **policy):
        found_inf = torch.tensor(found_inf, dtype=torch.float32, device=self.scale.device)
        update_scale_(self.scale, self.tracker, found_inf, *factors, self.overflows, **policy)
        return self.scale.item()


def assert_as_torch(state, found_inf, factors):
    scale, tracker = state.scale.clone(), state.tracker.clone()
    torch._amp_update_scale_(scale, tracker, torch.tensor(found_inf, device=scale.device), *factors)
    state.update(found_inf, factors)
    assert same_bits(state.scale, scale)
    assert torch.equal(state.tracker, tracker)


@pytest.mark.parametrize("found_inf", [0.0, -0.0, 1.0, 2.0, -1.0, INF, NAN])
@pytest.mark.parametrize("scale", SCALES)
def test_the_scale_moves_as_torch_moves_it(target, scale, found_inf):
    for tracker, factors in ((0, (2.0, 0.5, 1)), (0, (2.0, 0.5, 2)), (2, (1.1, 0.3, 3)), (7, (1 + 2**-30, 0.9, 3))):
        assert_as_torch(State(scale, tracker, device=target.device), found_inf, factors)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    scale=st.floats(0, width=32, allow_infinity=False),
    growth=st.floats(1, 1e40),
    backoff=st.floats(0, 1),
    found_inf=st.booleans(),
)
def test_factors_are_not_rounded_to_fp32(target, scale, growth, backoff, found_inf):
    assert_as_torch(State(scale, device=target.device), float(found_inf), (growth, backoff, 1))


def test_the_scale_stays_between_min_and_max(target):
    third = 1 / 3  # not an fp32 number: the bound is rounded, like any scale
    low, high = State(1.0, device=target.device), State(1.0, device=target.device)
    assert [low.update(1.0, min_scale=third) for _ in range(3)] == [0.5, *[torch.tensor(third).item()] * 2]
    assert [high.update(0.0, (2.0, 0.5, 1), max_scale=3.0) for _ in range(3)] == [2.0, 3.0, 3.0]
    assert State(3e38, device=target.device).update(0.0, (2.0, 0.5, 1), max_scale=3.2e38) == pytest.approx(3.2e38)


def test_hysteresis_counts_overflows_in_a_row(target):
    state = State(1024.0, tracker=1, device=target.device)
    scales = [state.update(found_inf, hysteresis=3) for found_inf in (1, 1, 0, 1, 1, 1, 1, 0, 1)]
    assert scales == [1024, 1024, 1024, 1024, 1024, 512, 256, 256, 256]
    assert state.overflows.tolist() == [1, 7]
    assert state.tracker.item() == 0


def test_an_overflow_without_backoff_delays_growth(target):
    state = State(8.0, tracker=2, device=target.device)
    assert [state.update(found_inf, hysteresis=2) for found_inf in (1, 0, 0, 0)] == [8, 8, 8, 16]


def test_scalars_may_have_one_dimension(target):
    state = State([8.0], [2], device=target.device)
    state.update([0.0])
    assert (state.scale.tolist(), state.tracker.tolist()) == ([16.0], [0])


def test_intervals_may_need_more_than_32_bits(target):
    """An int32 would take an interval of 2^32 + 1 for 1."""
    state = State(8.0, device=target.device)
    assert state.update(0.0, (2.0, 0.5, 2**32 + 1)) == 8.0
    assert state.update(1.0, hysteresis=2**32 + 1) == 8.0
