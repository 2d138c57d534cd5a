"""Moments in 8 bits: the error is what csrc/step/int8.h states, and a code decodes to what it is encoded from."""

import contextlib

import pytest
import torch

import mpkernels
from mpkernels.ops.step import int8
from tests.hard_grads import same_bits
from tests.ops.step.adamw_rows import Model
from tests.ops.step.rules_table import F32, I8, WEIGHTS

SQUARED = pytest.mark.parametrize("squared", [False, True], ids=["exp_avg", "exp_avg_sq"])


def moments(squared, size=5000, seed=0):
    """Return moments spread over ten orders of magnitude, within each block, too."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=generator) * 10 ** (torch.rand(size, generator=generator) * 10 - 10)
    return x * x if squared else x


@SQUARED
def test_errors_are_within_the_stated_bound(squared):
    values = moments(squared)
    codes, scales = int8.encode(values, squared)
    decoded = int8.decode(codes, scales, squared)
    scale = scales.repeat_interleave(256)[: len(values)].double()
    got, want = (x.double().sqrt() if squared else x.double() for x in (decoded, values))
    steps = 255 if squared else 127
    rounding = 2**-20 * scale  # of a handful of fp32 operations
    bound = scale * (1 / steps + 1 / (2 * steps) ** 2) + rounding
    assert ((got - want).abs() <= bound).all()
    assert (got.sign() == want.sign()).logical_or(got == 0).all()
    assert not squared or (got > 0).all()  # a second moment of 0 in the denominator would make the update explode


@SQUARED
def test_every_code_is_encoded_from_what_it_decodes_to(squared):
    """Decoding and encoding loses nothing, so a checkpoint may hold moments in fp32."""
    q = torch.arange(-128 if squared else -127, 128, dtype=torch.int32).to(torch.int8)
    codes = torch.cat([q, q[-1:].repeat(256 - len(q))])  # every block holds the largest code
    for scale in (1.0, 3e-7, 0.1, 1.9999999, 1e5, 2.0**-46):
        scales = torch.full((1,), scale)
        again, same_scales = int8.encode(int8.decode(codes, scales, squared), squared)
        assert torch.equal(again, codes)
        assert same_bits(same_scales, scales)


@SQUARED
def test_zeros_and_numbers_below_the_smallest_scale_become_0(squared):
    for tiny in (0.0, 1e-45):
        codes, scales = int8.encode(torch.full((300,), tiny if not squared else tiny * tiny), squared)
        assert scales.tolist() == [0.0, 0.0]
        assert int8.decode(codes, scales, squared).abs().max() == 0


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@SQUARED
def test_an_inf_or_nan_stays_one_and_spoils_no_other_block(squared, bad):
    values = moments(squared, 700)
    values[300] = bad
    decoded = int8.decode(*int8.encode(values, squared), squared)
    assert not decoded[300].isfinite()
    assert decoded[:256].isfinite().all()
    assert decoded[512:].isfinite().all()


def test_neighbours_in_memory_share_a_scale():
    values = torch.randn(3, 40, 6, 5).contiguous(memory_format=torch.channels_last)
    codes, scales = int8.encode(values, False)
    assert codes.stride() == values.stride()
    flat = values.permute(0, 2, 3, 1).reshape(-1)
    flat_codes, flat_scales = int8.encode(flat, False)
    assert torch.equal(codes.permute(0, 2, 3, 1).reshape(-1), flat_codes)
    assert torch.equal(scales, flat_scales)
    assert torch.equal(int8.decode(codes, scales, False).permute(0, 2, 3, 1).reshape(-1),
                       int8.decode(flat_codes, flat_scales, False))  # fmt: skip


def thresholds(squared):
    """Return the smallest number that gets each code, except the least code, in a block whose scale is 1."""
    codes = torch.arange(2, 256) - 128 if squared else torch.arange(1, 128)
    below, above = torch.zeros(len(codes), dtype=torch.int32), torch.ones(len(codes)).view(torch.int32)
    while (above - below > 1).any():
        middle = below + (above - below) // 2
        numbers = middle.view(F32)
        reached = codes_of(numbers.square() if squared else numbers, squared) >= codes
        below, above = torch.where(reached, below, middle), torch.where(reached, middle, above)
    return above.view(F32)


def codes_of(values, squared):
    """Return the reference's codes. Each number shares its block with a 1, so the block's scale is 1."""
    blocks = torch.zeros(len(values), 256)
    blocks[:, 0], blocks[:, 1] = 1, values
    return int8.encode(blocks.flatten(), squared)[0].view(len(values), 256)[:, 1].int()


def steps_as_the_reference(target, grads):
    """Return whether the target's bits are the reference's after three steps, in which the betas are 0."""
    options = {"sizes": (len(grads),), "weights": WEIGHTS[:2], "grads": (F32,), "states": (I8,)}
    ours, reference = Model(device=target.device, **options), Model(**options)
    for turn in range(3):
        for model, backend in ((ours, None), (reference, "reference")):
            given = [grads.roll(turn).to(model.device) for _ in model.params]
            with mpkernels.backend(backend) if backend else contextlib.nullcontext():
                model.step(given, beta1=[0.0, 0.0], beta2=[0.0, 0.0])
    return ours.differences(reference) == []


@pytest.mark.parametrize("scale", [1.0, 0.1, 3e-7])
def test_every_kernel_encodes_as_the_reference_at_every_threshold(target, scale):
    """The grads are each code's smallest number, and five neighbours in steps of the last place, with both signs."""
    least = torch.cat([thresholds(False), thresholds(True)]) * scale
    near = (least.view(torch.int32)[:, None] + torch.arange(-2, 4, dtype=torch.int32)).view(F32).flatten()
    near[1::2].neg_()
    blocks = torch.nn.functional.pad(near, (0, -len(near) % 255)).view(-1, 255)
    largest = torch.full((len(blocks), 1), scale)
    assert steps_as_the_reference(target, torch.cat([largest, blocks.clamp(-scale, scale)], 1).flatten())


@pytest.mark.parametrize("size", [1, 250, 300])
@pytest.mark.parametrize("odd", [float("inf"), -float("inf"), float("nan"), -0.0, 1e-45, 1e-9, 3e38], ids=str)
def test_every_kernel_encodes_odd_numbers_as_the_reference(target, odd, size):
    grads = torch.randn(size, generator=torch.Generator().manual_seed(size))
    grads[size // 2] = odd
    assert steps_as_the_reference(target, grads)
    assert steps_as_the_reference(target, torch.full_like(grads, odd))


def test_every_nan_gets_the_code_of_zero(target):
    """A NaN's bits differ: GPUs compute 0x7fffffff, CPUs 0x7fc00000 or the bits of an operand."""
    bits = torch.tensor([0x7FFFFFFF, 0x7FC00000, 0x7FC00001, 0x7FE54321], dtype=torch.int32)
    assert steps_as_the_reference(target, torch.cat([torch.ones(1), bits.view(F32)]))
