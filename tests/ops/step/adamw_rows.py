"""Rows of AdamW, whose lists are attributes, for tests of what every rule's step has in common."""

import math

import mpkernels
from tests.ops.step.rules_table import RULES, Rows


class Model(Rows):
    def __init__(self, sizes=(37, 1000), **kinds):
        super().__init__(RULES["adamw"], sizes, **kinds)

    def step(self, grads, maximize=(False, True), max_norm=math.inf, on_device=(), report=None, **changed):
        """Take a step. ``changed`` has hyperparameters of both groups, grad_scale and found_inf."""
        scalars = {name: changed.pop(name, None) for name in ("grad_scale", "found_inf")}
        super().step(grads, self.line.hypers | changed, maximize, max_norm, on_device, report, **scalars)


def _list_of(name):
    return property(lambda rows: rows.lists[name], lambda rows, tensors: rows.lists.update({name: tensors}))


for _name in ("params", "masters", "scales", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "steps"):
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
