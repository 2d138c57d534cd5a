"""Every kernel, the reference too, beside AdamW in fp64: each ``Model.step`` asks the oracle."""

import pytest
import torch

from tests.ops.step import oracle
from tests.ops.step.rules_table import B16, F16, F32, F64, I8, WEIGHTS
from tests.ops.step.test_adamw import Model

HYPER = {
    "decay": {"weight_decay": [0.1, 0.3]},
    "no decay": {"weight_decay": [0.0, 0.0]},
    "maximize": {"maximize": [True, False]},
    "a large eps": {"eps": [1e-2, 1.0]},
    "no first moment": {"beta1": [0.0, 0.0]},
    "short memories": {"beta1": [0.5, 0.99], "beta2": [0.6, 0.9999]},
    "a large rate": {"lr": [0.5, 0.1]},
}
FACTORS = {
    "unscaled": {"grad_scale": 1024.0},
    "unscaled by no power of two": {"grad_scale": 3.0},
    "clipped": {"max_norm": 0.5},
    "too small to clip": {"max_norm": 1e6},
    "unscaled and clipped": {"grad_scale": 8.0, "max_norm": 0.5},
    "checked for inf": {"found_inf": 0.0},
}


def small(target, **options):
    sizes = (37,) if target.is_interpreted else (37, 300)
    return Model(device=target.device, **({"sizes": sizes, "grads": (F32,)} | options))


def step_near_the_oracle(model, cases, options_of):
    """Step once to have states, then once in each case, which is told to whoever reads of a failure."""
    model.step(model.grads(0))
    for seed, case in enumerate(cases, 1):
        print(case)
        model.step(model.grads(seed), **options_of(case))


def test_steps_are_near_the_oracle_with_any_hyperparameters(target):
    step_near_the_oracle(small(target, weights=WEIGHTS[:2]), HYPER, HYPER.get)


@pytest.mark.kernels("reference")  # whose bits test_rules_same_bits.py asks of each kernel, for as many combinations
@pytest.mark.parametrize("state", [F32, B16, I8], ids=str)
@pytest.mark.parametrize("weight", WEIGHTS, ids=str)
def test_steps_are_near_the_oracle_with_any_masters_and_states(target, weight, state):
    model = small(target, weights=[weight], states=(state,), grads=(F32, F16, B16))
    for seed in range(3):
        model.step(model.grads(seed))


def test_steps_are_near_the_oracle_with_scaled_and_clipped_grads(target):
    step_near_the_oracle(small(target, weights=WEIGHTS[:2]), FACTORS, FACTORS.get)


def test_steps_are_near_the_oracle_after_any_number_of_steps(target):
    model = small(target, weights=WEIGHTS[:2], states=(F32, I8))

    def count(steps):
        for step in model.steps:
            step.fill_(steps)
        return {}

    step_near_the_oracle(model, (1, 9, 999, 10**6), count)


def test_steps_are_near_the_oracle_after_skipped_steps(target):
    model = small(target, weights=WEIGHTS[:2])
    for seed, found_inf in enumerate((0.0, 1.0, torch.inf, 0.0)):
        model.step(model.grads(seed), found_inf=found_inf, grad_scale=4.0, max_norm=1.0)


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"maximize": True}, {"weight_decay": 0.3}], ids=str)
def test_the_oracle_agrees_with_torch(options):
    """Compare the oracle with torch.optim.AdamW in fp64, where the order of operations matters little."""
    param = torch.nn.Parameter(torch.linspace(-1, 1, 50, dtype=F64))
    theirs = torch.optim.AdamW([param], lr=1e-2, foreach=False, **options)
    zeros = torch.zeros(50, dtype=F64)
    point = oracle.Point(param.detach().clone(), zeros, zeros, zeros if options.get("amsgrad") else None, 0)
    hyper = oracle.Hyper(1e-2, 0.9, 0.999, options.get("weight_decay", 1e-2), 1e-8, 1.0)
    for seed in range(20):
        grad = torch.randn(50, dtype=F64, generator=torch.Generator().manual_seed(seed)) / (1 + seed % 5)
        param.grad = grad
        theirs.step()
        point, _ = oracle.stepped(point, -grad if options.get("maximize") else grad, hyper)
    torch.testing.assert_close(point.weight, param.detach(), rtol=1e-13, atol=1e-14)


ONE_PER_CENT_OFF = {
    "params": lambda old, new: old + 1.01 * (new - old),
    "exp_avgs": lambda old, new: new * 1.01,
    "exp_avg_sqs": lambda old, new: new * 1.01,
    "max_exp_avg_sqs": lambda old, new: new * 1.01,
    "steps": lambda old, new: new + 1,
}


@pytest.mark.parametrize("name", ONE_PER_CENT_OFF)
def test_the_oracle_notices_one_per_cent(name):
    model = Model(sizes=(37,), weights=WEIGHTS[:1], grads=(F32,), states=(F32,))
    before, grads = oracle.snapshot(model), model.grads(0)
    model.step(grads)
    after = oracle.snapshot(model)
    group_hypers = oracle.Hyper(1e-2, 0.9, 0.999, 0.01, 1e-8, 1), oracle.Hyper(1e-3, 0.8, 0.99, 0.0, 1e-6, -1)
    hypers = [group_hypers[model.group_of(i)] for i in range(len(model.params))]
    oracle.assert_step(before, after, grads, hypers)
    setattr(after, name, list(map(ONE_PER_CENT_OFF[name], getattr(before, name), getattr(after, name))))
    with pytest.raises(AssertionError):
        oracle.assert_step(before, after, grads, hypers)
