"""A step at the ends of ranges, with inf and NaN, in odd layouts, with weights that somebody wrote to."""

import math

import pytest
import torch

import mpkernels
from tests.hard_grads import same_bits
from tests.ops.step.adamw_rows import Model, assert_same_steps, assert_the_references_bits
from tests.ops.step.rules_table import B16, F16, F32, I8, WEIGHTS


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
