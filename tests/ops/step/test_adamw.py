"""adamw_: every kernel gives the reference's bits, and each step of a Model is compared with AdamW in fp64."""

import math

import pytest
import torch

import mpkernels
from tests.hard_grads import same_bits
from tests.ops.step import oracle
from tests.ops.step.rules_table import F32, RULES, WEIGHTS, Rows


class Model(Rows):
    """Rows of AdamW whose lists are attributes, and each of whose steps is compared with AdamW in fp64."""

    def __init__(self, sizes=(37, 1000), **kinds):
        super().__init__(RULES["adamw"], sizes, **kinds)

    def step(self, grads, maximize=(False, True), max_norm=math.inf, on_device=(), report=None, **changed):
        """Take a step. ``changed`` has hyperparameters of both groups, grad_scale and found_inf."""
        scalars = {name: changed.pop(name, None) for name in ("grad_scale", "found_inf")}
        hypers, before = self.line.hypers | changed, oracle.snapshot(self)
        super().step(grads, hypers, maximize, max_norm, on_device, report, **scalars)
        signs = [-1 if maximized else 1 for maximized in maximize]
        group_hypers = [oracle.Hyper(*numbers) for numbers in zip(*hypers.values(), signs, strict=True)]
        param_hypers = [group_hypers[self.group_of(i)] for i in range(len(self.params))]
        oracle.assert_step(before, oracle.snapshot(self), grads, param_hypers, *scalars.values(), max_norm)


def _list_of(name):
    return property(lambda rows: rows.lists[name], lambda rows, tensors: rows.lists.update({name: tensors}))


for _name in oracle.STORED:
    setattr(Model, _name, _list_of(_name))


def assert_the_references_bits(target, act, **kinds):
    """Call ``act(model)`` on the target and with the reference, assert equal bits, and return the target's model."""
    ours, reference = Model(device=target.device, **kinds), Model(**kinds)
    act(ours)
    with mpkernels.backend("reference"):
        act(reference)
    assert ours.differences(reference) == []
    return ours


def assert_same_steps(target, steps=3, model=None, **arguments):
    def act(model):
        for seed in range(steps):
            model.step(model.grads(seed), **arguments)

    return assert_the_references_bits(target, act, **model or {})


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


def test_with_zero_grads_and_a_rate_of_0_no_weight_changes(target):
    """torch.distributed.checkpoint makes states by a step with zero grads and lr = 0. Not one bit may change."""
    kinds = {"sizes": (300,), "device": target.device, "in_pairs": target.is_interpreted}
    model, untouched = Model(**kinds), Model(**kinds)
    model.step([torch.zeros_like(grad) for grad in model.grads(0)], lr=[0.0, 0.0])
    assert {name for name, _ in model.differences(untouched)} == {"steps"}
