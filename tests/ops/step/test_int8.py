"""Moments in 8 bits: the error is what csrc/step/int8.h states, and a code decodes to what it is encoded from."""

import pytest
import torch

from mpkernels.ops.step import int8
from tests.cases import same_bits

SQUARED = pytest.mark.parametrize("squared", [False, True], ids=["exp_avg", "exp_avg_sq"])


def moments(squared, size=5000, seed=0):
    """Spread over ten orders of magnitude, within each block too."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=generator) * 10 ** (torch.rand(size, generator=generator) * 10 - 10)
    return x * x if squared else x


@SQUARED
def test_the_error_is_within_what_is_stated(squared):
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
    assert not squared or (got > 0).all()  # a 0 below the line would make the update explode


@SQUARED
def test_every_code_is_encoded_from_what_it_decodes_to(squared):
    """So a checkpoint may hold moments in fp32."""
    q = torch.arange(-128 if squared else -127, 128, dtype=torch.int32).to(torch.int8)
    codes = torch.cat([q, q[-1:].repeat(256 - len(q))])  # the largest code is there, as in any block
    for scale in (1.0, 3e-7, 0.1, 1.9999999, 1e5, 2.0**-46):
        scales = torch.full((1,), scale)
        again, same_scales = int8.encode(int8.decode(codes, scales, squared), squared)
        assert torch.equal(again, codes)
        assert same_bits(same_scales, scales)


@SQUARED
def test_zeros_and_what_is_below_the_smallest_scale(squared):
    for tiny in (0.0, 1e-45):
        codes, scales = int8.encode(torch.full((300,), tiny if not squared else tiny * tiny), squared)
        assert scales.tolist() == [0.0, 0.0]
        assert int8.decode(codes, scales, squared).abs().max() == 0


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@SQUARED
def test_what_is_not_finite_stays_so_and_stays_in_its_block(squared, bad):
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
