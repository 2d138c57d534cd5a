"""AdamW's rule beside torch's, where numbers are odd."""

import math

import torch

from mpkernels.optim import AdamW
from tests.ops.step.adamw_rows import Model, assert_the_references_bits
from tests.ops.step.rules_table import F32, WEIGHTS


def test_a_largest_second_moment_that_is_nan_stays_nan(target):
    """torch.maximum keeps a NaN, too."""
    options = {"sizes": (3,), "weights": WEIGHTS[:1], "grads": (F32,), "states": (F32,)}

    def step(model):
        model.max_exp_avg_sqs[1][1] = math.nan
        model.step(model.grads(0))

    ours = assert_the_references_bits(target, step, **options)
    assert ours.params[1].isnan().tolist() == [False, True, False]


def test_with_zero_grads_and_a_rate_of_0_no_weight_changes(target):
    """torch.distributed.checkpoint makes states by a step with zero grads and lr = 0. Not one bit may change."""
    kinds = {"sizes": (300,), "device": target.device, "in_pairs": target.is_interpreted}
    model, untouched = Model(**kinds), Model(**kinds)
    model.step([torch.zeros_like(grad) for grad in model.grads(0)], lr=[0.0, 0.0])
    assert {name for name, _ in model.differences(untouched)} == {"steps"}


def test_an_unguarded_inf_gives_an_exp_avg_of_inf_where_torchs_may_be_nan():
    """docs/differences.md: torch's exp_avg is NaN for a beta1 of 0.5 or less; the weight is NaN under both."""
    for beta1, expected in ((0.9, "inf"), (0.5, "nan")):
        for kind, is_torchs in ((AdamW, False), (torch.optim.AdamW, True)):
            weight = torch.nn.Parameter(torch.ones(1))
            weight.grad = torch.full_like(weight, float("inf"))
            optimizer = kind([weight], betas=(beta1, 0.99))
            optimizer.step()
            assert str(optimizer.state[weight]["exp_avg"].item()) == (expected if is_torchs else "inf")
            assert weight.isnan().all()


def test_exp_avg_after_a_large_and_a_small_grad_is_torchs_but_for_a_rounding():
    """docs/differences.md says that it differs for a beta1 of 0.5 or less: by a rounding of the large grad at most."""
    for beta1 in (0.0, 0.25, 0.5, 0.9):
        ours, theirs = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
        optimizers = AdamW([ours], betas=(beta1, 0.999)), torch.optim.AdamW([theirs], betas=(beta1, 0.999))
        for grad in (torch.tensor([30.0, -7.0]), torch.tensor([3e-7, 2e-6])):
            for param, optimizer in zip((ours, theirs), optimizers, strict=True):
                param.grad = grad.clone()
                optimizer.step()
        found, torchs = (it.state[param]["exp_avg"] for it, param in zip(optimizers, (ours, theirs), strict=True))
        error_of_the_largest = 2 * torch.finfo(torch.float32).eps * torch.tensor([30.0, 7.0])
        assert ((found - torchs).abs() <= error_of_the_largest).all()
        assert beta1 > 0 or (found[0] == 0 and torchs[0] == grad[0])
