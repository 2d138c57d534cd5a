"""Lion's rule where a grad has no sign, and what its class refuses."""

import math

import pytest
import torch

import mpkernels
from tests.networks import network
from tests.ops.step.rules_table import F32, RULES, WEIGHTS, Rows


def test_zero_and_nan_have_no_sign_as_in_torch_and_nan_stays_in_the_momentum(target):
    rows = Rows(RULES["lion"], sizes=(3,), weights=WEIGHTS[:1], grads=(F32,) * 2, states=(F32,), device=target.device)
    before = [it.cpu().clone() for it in rows.lists["params"]]
    hypers = {"lr": (0.5, 0.5), "beta1": (0.5, 0.5), "beta2": (0.5, 0.5), "weight_decay": (0.0, 0.0)}
    rows.step([torch.tensor([0.0, 2.0, math.nan], device=target.device)] * 2, hypers)
    for i, sign in enumerate((1, -1)):  # the second group is maximized
        moved = before[i] - rows.lists["params"][i].cpu()
        torch.testing.assert_close(moved, torch.tensor([0.0, 0.5 * sign, 0.0]))
        torch.testing.assert_close(
            rows.lists["exp_avgs"][i].cpu(), torch.tensor([0.0, 1.0 * sign, math.nan]), equal_nan=True
        )


def test_lion_refuses_bad_inputs():
    for options, text in (
        ({"lr": -1.0}, "lr must be 0 or above, got -1.0"),
        ({"betas": (0.9, 1.0)}, r"betas must be from 0 to below 1, got \(0.9, 1.0\)"),
        ({"weight_decay": -0.1}, "weight_decay must be 0 or above, got -0.1"),
    ):
        with pytest.raises(ValueError, match=f"^Lion: {text}$"):
            mpkernels.optim.Lion(network().parameters(), **options)
