"""How many rows linear_act's CUDA C++ multiplies before a pass reads them: as the chip has it, emulated; and what comes
of that."""

from functools import partial

import pytest
import torch

from tests.linear_cases import before_a_layer, layer
from tests.ops.linear.test_cublas import dact, forward
from tests.ops.linear.test_cublaslt import launches
from tests.targets import emulated_variable

B16, F32 = torch.bfloat16, torch.float32
MB = 2**20

# Multiprocessors, bytes of L2, columns, and rows: tiles of 128 x 128, which are 64 KB of fp32.
CHIPS = [
    (3, MB, 8, 6 * 128),  # half of the cache has 8 tiles, two waves of the three multiprocessors 6
    (3, MB, 136, 3 * 128),  # two tiles side by side
    (4, MB, 264, 2 * 128),  # three, so that of 8 tiles 6 are used
    (3, MB, 1000, 128),  # eight: not even one below the other
    (7, MB // 4, 136, 3 * 128),  # a wave is more than the cache has
    (5, 3 * MB, 80, 20 * 128),
    (132, 50 * MB, 8192, 6 * 128),  # H100: three waves are 396 of 400 tiles, 64 side by side
]


@pytest.fixture
def chip(emulated, request, monkeypatch):
    """The columns of a matrix, and how many rows of it the chip should have at once."""
    multiprocessors, l2_bytes, columns, rows = request.param
    monkeypatch.setattr(emulated_variable("emulation_multiprocessors"), "value", multiprocessors)
    monkeypatch.setattr(emulated_variable("emulation_l2_bytes"), "value", l2_bytes)
    return columns, rows


@pytest.mark.parametrize("chip", CHIPS, ids=str, indirect=True)
def test_a_product_and_a_pass_for_so_many_rows(chip):
    """Two launches for as many rows as fit, and two more for the next one. Each row is what it is alone."""
    columns, at_once = chip
    x, weight, bias, _ = layer(2 * at_once + 1, 1, columns, B16)
    for rows, blocks in ((at_once, 1), (at_once + 1, 2), (2 * at_once, 2), (2 * at_once + 1, 3)):
        (y, z), count = launches(forward, x[:rows], weight, bias, "relu2", True)
        assert count == 2 * blocks
    for part in (slice(0, 5), slice(at_once - 5, at_once + 5), slice(2 * at_once - 5, None)):
        part_y, part_z = forward(x[part], weight, bias, "relu2", True)
        assert torch.equal(y[part], part_y)
        assert torch.equal(z[part], part_z)


@pytest.mark.parametrize("bias_dtype", [B16, F32], ids=str)
@pytest.mark.parametrize("chip", CHIPS[:-1], ids=str, indirect=True)
def test_sums_over_all_products(chip, bias_dtype):
    """In fp32 there is one product: its results are the same, but for their rounding, and its sums go another way."""
    columns, at_once = chip
    rows = 2 * at_once + 77
    dy, weight, z = before_a_layer(rows, 1, columns, B16)
    (dz, dbias, h), count = launches(partial(dact, wants_h=True), dy, weight, z, "silu", bias_dtype)
    assert count == 2 * 3 + 1
    assert torch.equal(dbias, dact(dy, weight, z, "silu", bias_dtype)[1])  # though blocks run in another order
    wide_dz, wide_dbias, wide_h = dact(dy.float(), weight.float(), z.float(), "silu", F32, wants_h=True)
    assert torch.equal(dz, wide_dz.to(B16))
    assert torch.equal(h, wide_h.to(B16))
    error = (dbias - wide_dbias).abs()
    rounding = torch.finfo(bias_dtype).eps / 2 * wide_dbias.abs() if bias_dtype == B16 else 0
    assert (error <= 2 * rows**0.5 * torch.finfo(F32).eps * wide_dz.abs().sum(0) + rounding).all()
