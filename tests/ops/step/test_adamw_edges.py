"""adamw_ at the ends of ranges, with inf and NaN, in odd layouts, with weights that somebody wrote to; its outcome."""

import math

import pytest
import torch

import mpkernels
from mpkernels.ops.step.rules.adamw import ADAMW, adamw_
from tests.hard_grads import same_bits
from tests.ops.step.rules_table import B16, F16, F32, I8, WEIGHTS
from tests.ops.step.test_adamw import Model, assert_same_steps, assert_the_references_bits


def test_moments_of_many_chunks_give_the_references_bits(target):
    """One size is exactly a chunk, another some chunks and more: scales lie right, and the step counts once."""
    options = {"sizes": (8192, 16384 + 513), "weights": [(B16, "split")], "grads": (F32,), "states": (F32, I8)}
    model = assert_same_steps(target, steps=2, model=options)
    assert {step.item() for step in model.steps} == {2.0}


def test_more_parameters_than_a_launch_takes_give_the_references_bits(target):
    if target.is_interpreted:
        pytest.skip("has no such limit")
    options = {"sizes": (3,) * 60, "weights": WEIGHTS[:4], "grads": (F32,), "states": (F32,)}
    assert_same_steps(target, steps=2, model=options)


def test_fillings_of_8_bit_blocks_count_for_nothing_when_moments_shrink(target):
    """The last block of 8-bit moments is filled up. Codes of 0 there would mean half the scale, and must not count."""
    options = {"sizes": (37, 300), "weights": WEIGHTS[:1], "grads": (F32,), "states": (I8,)}

    def steps(model):
        for scales in model.scales:
            scales.fill_(1e3)  # all moments are 0 nevertheless
        for seed, factor in enumerate((1.0, 1e-3, 1e-6)):
            model.step([grad * factor for grad in model.grads(seed)], beta1=[0.1] * 2, beta2=[0.01] * 2)

    assert_the_references_bits(target, steps, **options)


def test_a_largest_second_moment_that_is_nan_stays_nan(target):
    """torch.maximum keeps a NaN, too."""
    options = {"sizes": (3,), "weights": WEIGHTS[:1], "grads": (F32,), "states": (F32,)}

    def step(model):
        model.max_exp_avg_sqs[1][1] = math.nan
        model.step(model.grads(0))

    ours = assert_the_references_bits(target, step, **options)
    assert ours.params[1].isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("states", [F32, B16, I8], ids=str)
def test_a_weight_that_was_written_to_replaces_its_copied_master(target, states):
    """If the weight is just its master's rounding, nobody wrote to it, and the master stays, to the last bit."""
    options = {"sizes": (300,), "weights": [(B16, "fp32"), (F16, "fp32")], "grads": (F32,), "states": (states,)}
    ours, reference = Model(device=target.device, **options), Model(**options)
    masters = torch.tensor([1.0 + 2.0**-9, 1.0 + 2.0**-11, 65519.0, 65520.0, 1e30, 1e-40, 2.0**-25, math.inf, math.nan])
    for model in (ours, reference):
        for param, master in zip(model.params, model.masters, strict=True):
            master[:9] = master[20:29] = masters.to(master.device)
            param.copy_(master.cpu().to(param.dtype))  # not on a GPU, whose NaN is 0x7fff: the next number is -0.0
            param[10:13] = torch.tensor([0.0, -0.0, 7.0])
            master[10:13] = torch.tensor([-0.0, 1e-30, 7.0001])
            param[13:30].view(torch.int16).add_(1)  # the next number, or a NaN
            param[290:] = -3.0
    expected = [
        torch.where(master.to(param.dtype).view(torch.int16) == param.view(torch.int16), master, param.float())
        for param, master in ((x.cpu(), y.cpu()) for x, y in zip(ours.params, ours.masters, strict=True))
    ]
    at_rest = {"lr": [0.0] * 2, "weight_decay": [0.0] * 2, "maximize": (False, False)}
    grads = [grad.abs() for grad in ours.grads(0)]  # -0.0 - 0.0 is -0.0, but -0.0 - -0.0 is 0.0
    ours.step(grads, found_inf=1.0, **at_rest)
    ours.step(grads, **at_rest)
    assert all(same_bits(master.cpu(), it) for master, it in zip(ours.masters, expected, strict=True))
    ours.step(ours.grads(1))
    with mpkernels.backend("reference"):
        reference.step([grad.cpu() for grad in grads], **at_rest)
        reference.step(reference.grads(1))
    assert ours.differences(reference) == []


ENDS = (2.0**-127, 2.0**-126, 2.0**-124, math.inf, -math.inf, math.nan, 1e30, 1e-30, 0.0)


@pytest.mark.each_value_once
@pytest.mark.parametrize("states", [F32, B16, I8], ids=str)
def test_grads_at_the_ends_of_the_range_give_the_references_bits(target, states):
    """No guard skips these steps: an inf or NaN spreads no further than it must, to the same bits in every kernel."""
    weights = WEIGHTS[1:4:2] if target.is_interpreted else WEIGHTS
    options = {"sizes": (300,) * len(ENDS), "weights": weights, "grads": (F32,), "states": (states,)}

    def steps(model):
        for seed in range(2):
            grads = model.grads(seed)
            for i, grad in enumerate(grads):
                end = ENDS[i * len(ENDS) // len(grads)]
                grad[3:200:9] = end
                grad[256:] = end  # a block of 8-bit moments, with nothing else in it
            model.step(grads, beta1=[0.0, 0.9])  # with a beta1 of 0, the moment is the grad

    assert_the_references_bits(target, steps, **options)


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


LAYOUTS = {
    "plain": lambda value: value.contiguous(),
    "last": lambda value: value.contiguous(memory_format=torch.channels_last),
    "sliced": lambda value: torch.stack([value, value], -1)[..., 0],
}
KINDS = [("last", "plain", "plain", "last"), ("plain", "last", "sliced", "plain"), ("sliced", "plain", "last", "last")]


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
@pytest.mark.parametrize("states", [F32, I8], ids=str)
@pytest.mark.parametrize("weight", WEIGHTS[1:4:2], ids=str)
def test_lists_in_different_layouts_give_the_references_bits(target, weight, states, kinds):
    """8-bit moments share their scales in the order in which they lie in memory."""

    def steps(model):
        grads = model.grads(0)
        lists = {"params": kinds[0], "masters": kinds[1]} | dict.fromkeys(("exp_avgs", "exp_avg_sqs"), kinds[3])
        for name, kind in (lists | {"max_exp_avg_sqs": kinds[3]}).items():
            laid_out = [LAYOUTS[kind](it.view(4, 6, 5, 3)) if it.numel() else it for it in getattr(model, name)]
            setattr(model, name, laid_out)
        for _ in range(2):
            model.step([LAYOUTS[kinds[2]](grad.view(4, 6, 5, 3)) for grad in grads])

    assert_the_references_bits(target, steps, sizes=(360,), weights=[weight], grads=(F32,), states=(states,))


def channels_last(tensor):
    return tensor.view(4, 6, 5, 3).contiguous(memory_format=torch.channels_last) if tensor.numel() else tensor


def test_a_weight_that_was_written_to_stays_beside_a_stale_remainder(target):
    """A stale remainder could move 0, inf and powers of two to a smaller neighbour, or inf to NaN."""
    size = 2**16 // 7
    options = {"sizes": (size,), "weights": [(B16, "split"), (F16, "split")], "grads": (F32,), "states": (F32,)}
    patterns = torch.cat([torch.arange(size - 64) * 7, torch.arange(64) * 1024]).to(torch.int16)
    stale = torch.tensor([-32768, -16385, -16384, -1, 0, 1, 32767], dtype=torch.int16)

    def step(model):
        for param, remainder in zip(model.params, model.masters, strict=True):
            param.view(torch.int16).copy_(patterns)
            remainder.copy_(stale.repeat(size // 7 + 1)[:size])
        model.step([grad * 0 for grad in model.grads(0)], lr=[0.0] * 2, weight_decay=[0.0] * 2)

    ours = assert_the_references_bits(target, step, **options)
    for param in ours.params:
        is_number = ~patterns.view(param.dtype).isnan()
        assert torch.equal(param.cpu().view(torch.int16)[is_number], patterns[is_number])
