"""A step of every kernel refuses wrong tensors before it writes anything."""

import math

import pytest
import torch

from mpkernels.ops.step.rules.adamw import ADAMW, adamw_
from tests.hard_grads import same_bits
from tests.ops.step.adamw_rows import Model
from tests.ops.step.rules_table import F32, I8, WEIGHTS
from tests.ops.step.test_rules_same_bits import LAYOUTS


def channels_last(tensor):
    return LAYOUTS["last"](tensor) if tensor.numel() else tensor


BAD = {  # which lists are changed, and how
    "too few": ("scales", lambda scales: scales[:-1]),
    "as many as without a largest": ("scales", lambda scales: scales[:4]),
    "fp64": ("scales", lambda scales: scales.double()),
    "with gaps": ("scales", lambda scales: torch.stack([scales, scales], -1)[:, 0]),
    "moments with gaps": ("exp_avgs exp_avg_sqs max_exp_avg_sqs", LAYOUTS["sliced"]),
    "squares elsewhere": ("exp_avg_sqs", channels_last),
    "largest elsewhere": ("max_exp_avg_sqs", channels_last),
}


@pytest.mark.parametrize(("names", "change"), BAD.values(), ids=BAD)
def test_scales_that_do_not_fit_their_moments_are_refused(target, names, change):
    """A kernel would read beyond wrong scales, or use another tensor's."""
    model, untouched = (
        Model(sizes=(360,), weights=WEIGHTS[:1], grads=(F32,), states=(I8,), device=target.device) for _ in range(2)
    )
    for each in ("params", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"):
        setattr(model, each, [it.view(4, 6, 5, 3) if it.numel() else it for it in getattr(model, each)])
    for name in names.split():
        setattr(model, name, list(map(change, getattr(model, name))))
    with pytest.raises(ValueError, match=r"adamw_: (scales|(max_)?exp_avg(_sq)?s)\[\d\] must"):
        model.step([grad.view(4, 6, 5, 3) for grad in model.grads(0)])
    assert all(same_bits(a.flatten(), b) for a, b in zip(model.params, untouched.params, strict=True))


FLAGS = {
    "grad_scale": (1, F32),
    "found_inf": (1, F32),
    "total_sumsq": (1, torch.float64),
    "outcome": (2, F32),
    "skipped_steps": (1, F32),
}


@pytest.mark.parametrize("which", FLAGS)
def test_flags_of_the_wrong_size_or_dtype_are_refused(target, which):
    model = Model(sizes=(3,), weights=WEIGHTS[:1], grads=(F32,), states=(F32,), device=target.device)
    lists = [getattr(model, name) for name in ADAMW.lists if name not in ("params", "grads")]
    hypers = [2], [0.1], [0.9], [0.99], [0.0], [1e-8], [False], []
    for wrong in ((3, FLAGS[which][1]), (FLAGS[which][0], torch.int32)):
        kinds = FLAGS | {which: wrong}
        flags = {name: torch.zeros(size, dtype=dtype, device=target.device) for name, (size, dtype) in kinds.items()}
        before = flags["grad_scale"], flags["found_inf"], flags["total_sumsq"], math.inf
        with pytest.raises((ValueError, TypeError), match=f"adamw_: {which} must"):
            adamw_.step(
                model.params, model.grads(0), *lists, *hypers, *before, flags["outcome"], flags["skipped_steps"], None
            )


def test_too_few_hyperparameters_on_the_device_are_refused(target):
    model = Model(sizes=(3,), weights=WEIGHTS[:1], grads=(F32,), states=(F32,), device=target.device)
    with pytest.raises(ValueError, match="adamw_: on_device must"):
        model.step(model.grads(0), on_device=[torch.ones((), device=target.device)] * 5)
