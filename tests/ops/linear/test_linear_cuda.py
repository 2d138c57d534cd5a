"""linear_act's CUDA C++ around torch's products, under emulation: layouts, sums over many blocks, launches."""

import itertools
from functools import partial

import pytest
import torch

from mpkernels.ops.linear.linear_act import _linear_act as forward
from mpkernels.ops.linear.linear_act import _linear_act_backward as backward
from mpkernels.ops.linear.linear_dact import _linear_dact
from tests.linear_cases import integers, layer, transposed, with_gaps
from tests.targets import emulated_variable

B16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def dact(*arguments, wants_h=False):
    return _linear_dact(*arguments, wants_h)


def with_a_gap(matrix):
    return torch.cat([matrix, matrix[:, :1]], 1)[:, :-1]  # the rows after the first one are aligned otherwise


def beside_alignment(matrix):
    return torch.cat([matrix.new_zeros(1), matrix.flatten()])[1:].view(matrix.shape)


LAYOUTS = (transposed, with_a_gap, lambda matrix: transposed(with_a_gap(matrix)), with_gaps, beside_alignment)
SHAPES = [(6, 5, 7), (6, 8, 16), (1, 8, 16), (6, 1, 16), (6, 8, 1), (1, 1, 1)]


def whole_numbers(rows, features, outputs, dtype):
    """Return x, weight, bias and dy, whose sums of products are exact in any order."""
    shapes = (rows, features), (outputs, features), (outputs,), (rows, outputs)
    return [integers(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]


@pytest.mark.parametrize("dtype", [B16, F32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layouts_change_no_bit(emulated, shape, dtype):
    """Each operand has each layout. A wrong stride would read other numbers."""
    x, weight, bias, dy = whole_numbers(*shape, dtype)
    y, z = forward(x, weight, bias, "relu2", True)
    wanted = backward(dy, x, weight, z, "relu2", F32, dtype)
    for layout in LAYOUTS:
        strange_bias = layout(bias.unsqueeze(0)).squeeze(0)
        for are_strange in itertools.product([False, True], repeat=2):
            operands = [layout(it) if strange else it for it, strange in zip((x, weight), are_strange, strict=True)]
            assert all(map(torch.equal, forward(*operands, strange_bias, "relu2", True), (y, z)))
            for strange_dy, strange_z in ((layout(dy), z), (dy, layout(z))):
                for by_columns in (False, True):
                    got = backward(strange_dy, *operands, strange_z, "relu2", F32, dtype, by_columns)
                    assert all(map(torch.equal, got, wanted))


@pytest.mark.parametrize("dtype", [B16, F32], ids=str)
@pytest.mark.parametrize("shape", SHAPES[:-1], ids=str)
def test_layouts_change_no_bit_of_dact(emulated, shape, dtype):
    rows, outputs, columns = shape
    operands = [integers(*it, dtype=dtype) for it in ((rows, outputs), (outputs, columns), (rows, columns))]
    wanted = dact(*operands, "silu", F32, wants_h=True)
    for layout in LAYOUTS:
        for are_strange in itertools.product([False, True], repeat=3):
            given = [layout(it) if strange else it for it, strange in zip(operands, are_strange, strict=True)]
            assert all(map(torch.equal, dact(*given, "silu", F32, wants_h=True), wanted))


# Blocks of columns are whole or not. Blocks of rows are one, several, or so many that they grow longer. 70,000 rows
# give 1,094 sums, of which a thread adds up 34.
SUMS = [(1, 8), (31, 264), (33, 256), (700, 40), (2000, 300), (8300, 264), (1100, 7), (2_200_000, 1), (70_000, 9)]


@pytest.mark.parametrize("dtype", [B16, F32], ids=str)
@pytest.mark.parametrize(("rows", "columns"), SUMS)
def test_bias_gradients_are_near_to_fp64_over_many_blocks(emulated, rows, columns, dtype):
    """No number goes through more than 2 sqrt(rows) additions, and each rounds a part of the sum of magnitudes."""
    dy = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(dtype)
    first, second = (backward(dy, None, None, dy.new_empty(0), "none", None, F32)[2] for _ in range(2))
    assert torch.equal(first, second)  # although blocks run in another order each time
    wide = dy.double()
    error, largest = (first - wide.sum(0)).abs(), 2 * rows**0.5 * torch.finfo(F32).eps / 2
    assert (error <= largest * wide.abs().sum(0)).all()
    rounded = backward(dy, None, None, dy.new_empty(0), "none", None, dtype)[2]
    assert torch.equal(rounded, first.to(dtype))


@pytest.mark.parametrize(("rows", "blocks"), [(33, 2), (2100, 3), (8300, 9)])
def test_the_more_sums_the_more_blocks_add_them_up(emulated, rows, blocks):
    """Each of 256 threads takes 8 of the 264 columns. There are 2, 66 and 260 rows of sums."""
    dy = torch.ones(rows, 264)
    backward(dy, None, None, dy.new_empty(0), "none", None, F32)
    assert emulated_variable("emulation_blocks").value == blocks


def test_a_call_launches_no_more_than_it_needs(emulated):
    """The forward is a product and a pass. The backward is a pass, two products, and another pass for partial sums."""
    launches = emulated_variable("emulation_launches")

    def count(function, *arguments):
        before = launches.value
        function(*arguments)
        return launches.value - before

    for dtype in (B16, F32):
        x, weight, bias, dy = layer(32, 8, 16, dtype)
        assert count(forward, x, weight, bias, "gelu", True) == 2
        assert count(forward, x, weight, bias, "none", True) == 1
        assert count(backward, dy, x, weight, dy, "gelu", dtype, dtype) == 3
        assert count(backward, dy, x, weight, dy, "gelu", F32, None) == 3
        assert count(backward, dy, x, weight, dy.new_empty(0), "none", dtype, None) == 2
        assert count(backward, dy, None, None, dy, "gelu", None, dtype) == 1
        assert count(dact, x, weight.t(), dy, "gelu", dtype) == 2
        assert count(partial(dact, wants_h=True), x, weight.t(), dy, "gelu", dtype) == 2
        assert count(dact, x.repeat(100, 1), weight.t(), dy.repeat(100, 1), "gelu", dtype) == 3
        assert count(dact, x.repeat(100, 1), weight.t(), dy.repeat(100, 1), "gelu", None) == 2
        many = dy.repeat(100, 1)
        assert count(backward, many, None, None, many, "gelu", None, dtype) == 2


def test_sixteen_bits_are_rounded_as_torch_rounds_them(emulated):
    x, weight, bias, _ = layer(33, 40, 24, B16)
    y, z = forward(x, weight, bias, "silu", True)
    assert torch.equal(z, torch.nn.functional.linear(x, weight, bias))
    torch.testing.assert_close(y, torch.nn.functional.silu(z.float()).to(B16), rtol=torch.finfo(B16).eps, atol=0)
