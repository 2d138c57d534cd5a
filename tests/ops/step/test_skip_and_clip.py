"""When a step is skipped, what it multiplies its grads by, and the outcome that it writes."""

import math

import pytest
import torch

from mpkernels.ops.step.rules.adamw import ADAMW, adamw_
from tests.hard_grads import same_bits
from tests.ops.step.adamw_rows import Model, assert_same_steps
from tests.ops.step.rules_table import F32, WEIGHTS


@pytest.mark.parametrize(("grad", "grad_scale", "moves"), [(3e38, 0.5, False), (3e38, 1.0, True), (3e38, 4.0, True)])
def test_a_step_is_skipped_if_unscaling_overflows(target, grad, grad_scale, moves):
    """With a scale below 1, unscaling may overflow although every grad is finite."""
    model = Model(sizes=(1,), weights=WEIGHTS[:1], grads=(F32,), states=(F32,), device=target.device)
    before = [tensor.clone() for tensor in model.params]
    grads = [torch.full_like(grad, 0.0) for grad in model.grads(0)]
    grads[-1].fill_(grad)
    model.step(grads, grad_scale=grad_scale, max_norm=1.0)
    assert {step.item() for step in model.steps} == {float(moves)}
    assert all(map(same_bits, model.params, before)) != moves


@pytest.mark.parametrize("max_norm", [1.0, math.inf])
@pytest.mark.parametrize(("grad_scale", "moves"), [(0.0, False), (2.0**-130, False), (math.nan, False), (1e-38, True)])
def test_a_step_is_skipped_if_the_scales_inverse_overflows(target, grad_scale, moves, max_norm):
    """Grads of 0 would become NaN."""
    model = Model(sizes=(5,), weights=WEIGHTS[:1], grads=(F32,), states=(F32,), device=target.device)
    before = [tensor.clone() for tensor in model.params]
    model.step([torch.zeros_like(grad) for grad in model.grads(0)], grad_scale=grad_scale, max_norm=max_norm)
    assert {step.item() for step in model.steps} == {float(moves)}
    assert all(map(same_bits, model.params, before)) != moves


def test_a_norm_beyond_fp32_is_no_overflow_without_a_scale(target):
    model = Model(sizes=(2,), weights=WEIGHTS[:1], grads=(F32,), states=(F32,), device=target.device)
    model.step([torch.full_like(grad, 3e38) for grad in model.grads(0)], max_norm=1.0)
    assert {step.item() for step in model.steps} == {1.0}


def test_empty_parameters_count_their_steps(target):
    model = Model(sizes=(0, 5), grads=(F32,), device=target.device, in_pairs=target.is_interpreted)
    model.step(model.grads(0))
    assert {step.item() for step in model.steps} == {1.0}


def test_the_reciprocal_of_a_scale_is_rounded_once(target):
    """The scale's reciprocal is rounded to fp32, as by torch's GradScaler, and not again before clipping."""
    options = {"sizes": (333,), "states": (F32,), "weights": WEIGHTS[:1], "grads": (F32,)}
    for scale in (3.0, 7.0, 11.0, 1000.0):
        assert_same_steps(target, steps=2, model=options, grad_scale=scale, max_norm=0.5)


@pytest.mark.each_value_once
@pytest.mark.parametrize("scale", [None, 3.0])
@pytest.mark.parametrize("found_inf", [None, 0.0, 1.0, math.nan])
@pytest.mark.parametrize("sumsq", [None, 50.0])
@pytest.mark.parametrize("max_norm", [math.inf, 1.0])
def test_the_outcome_has_the_norm_and_whether_the_step_was_skipped(target, scale, found_inf, sumsq, max_norm):
    def number(value, dtype=F32):
        return None if value is None else torch.full((), value, dtype=dtype, device=target.device)

    outcome, skipped_steps = torch.full((2,), -1.0, device=target.device), number(5.0)
    # Several chunks, of which only one may write the outcome.
    param, *states = (torch.ones(20_000, device=target.device) for _ in range(3))
    step, hyper = torch.zeros((), device=target.device), ([0.1], [0.9], [0.99], [0.1], [1e-8], [False])
    lists = [param], [torch.ones_like(param)], *([state] for state in states), [], [], [], [step], [1]
    adamw_.step(*lists, *hyper, [], number(scale), number(found_inf), number(sumsq, torch.float64), max_norm, outcome,
           skipped_steps, None)  # fmt: skip
    unscale = 1.0 if scale is None else torch.tensor(1 / scale).item()
    norm = -1.0 if sumsq is None else torch.tensor(math.sqrt(sumsq) * unscale).item()
    is_skipped = float(bool(found_inf))
    assert outcome.tolist() == [norm, is_skipped]
    assert skipped_steps.item() == 5.0 + is_skipped
    assert step.item() == 1.0 - is_skipped


@pytest.mark.parametrize("max_norm", [1.0, math.inf])
def test_a_nan_norm_is_not_taken_for_a_small_one(target, max_norm):
    """Clipping by a NaN norm makes all weights NaN. Without clipping, the norm isn't read."""
    model = Model(sizes=(40,), grads=(F32,), device=target.device)
    model.steps = [step.fill_(1.0) for step in model.steps]
    nan = torch.full((), math.nan, dtype=torch.float64, device=target.device)
    groups, hyper = [len(model.params)], ([0.1], [0.9], [0.99], [0.1], [1e-8], [False])
    lists = (getattr(model, name) for name in ADAMW.lists[2:])
    adamw_.step(model.params, model.grads(0), *lists, groups, *hyper, [], None, None, nan, max_norm, None, None, None)
    assert {bool(param.isnan().all()) for param in model.params} == {max_norm == 1.0}
    assert {bool(param.isnan().any()) for param in model.params} == {max_norm == 1.0}
