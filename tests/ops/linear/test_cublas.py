"""linear_act's CUDA C++ around cuBLAS, under emulation: layouts, sums over many blocks, launches, errors."""

import itertools
import subprocess
import sys
from functools import partial

import pytest
import torch

from mpkernels.ops import _registry
from tests import ROOT
from tests.linear_cases import before_a_layer, layer
from tests.ops.test_ops import ARGUMENTS
from tests.targets import TARGETS, emulated_variable

B16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def forward(*arguments):
    return _registry._ops["linear_act"](*arguments)


def backward(*arguments):
    return _registry._ops["linear_act_backward"](*arguments)


def dact(*arguments, wants_h=False):
    """dz and dbias, and h where it is wanted."""
    return _registry._ops["linear_dact"](*arguments, wants_h)[: 2 + wants_h]


def transposed(matrix):
    return matrix.t().contiguous().t()


def with_a_gap(matrix):
    return torch.cat([matrix, matrix[:, :1]], 1)[:, :-1]  # rows are not aligned as the first one is


def every_second(matrix):
    return torch.stack([matrix, matrix + 1], -1)[..., 0]


def beside_alignment(matrix):
    return torch.cat([matrix.new_zeros(1), matrix.flatten()])[1:].view(matrix.shape)


LAYOUTS = (transposed, with_a_gap, lambda it: transposed(with_a_gap(it)), every_second, beside_alignment)


@pytest.mark.parametrize("dtype", [B16, F32], ids=str)
@pytest.mark.parametrize("shape", [(6, 5, 7), (6, 8, 16), (1, 8, 16), (6, 1, 16), (6, 8, 1), (1, 1, 1)], ids=str)
def test_layouts_change_no_bit(emulated, shape, dtype):
    """Each operand in each layout; a wrong leading dimension or transpose reads other numbers, or is refused."""
    x, weight, bias, dy = layer(*shape, dtype)
    y, z = forward(x, weight, bias, "silu", True)
    wanted = backward(dy, x, weight, z, "silu", F32, dtype)
    for layout in LAYOUTS:
        strange_bias = layout(bias.unsqueeze(0)).squeeze(0)
        for which in itertools.product([False, True], repeat=2):
            operands = [layout(it) if strange else it for it, strange in zip((x, weight), which, strict=True)]
            assert all(map(torch.equal, forward(*operands, strange_bias, "silu", True), (y, z)))
            for strange_dy, strange_z in ((layout(dy), z), (dy, layout(z))):
                got = backward(strange_dy, *operands, strange_z, "silu", F32, dtype)
                assert all(map(torch.equal, got, wanted))


@pytest.mark.parametrize("dtype", [B16, F32], ids=str)
@pytest.mark.parametrize("shape", [(6, 5, 7), (6, 8, 16), (1, 8, 16), (6, 1, 16), (6, 8, 1)], ids=str)
def test_layouts_change_no_bit_of_dact(emulated, shape, dtype):
    operands = before_a_layer(*shape, dtype)
    wanted = dact(*operands, "silu", F32, wants_h=True)
    for layout in LAYOUTS:
        for which in itertools.product([False, True], repeat=3):
            strange = [layout(it) if changes else it for it, changes in zip(operands, which, strict=True)]
            assert all(map(torch.equal, dact(*strange, "silu", F32, wants_h=True), wanted))


@pytest.mark.parametrize("dtype", [B16, F32], ids=str)
def test_operands_that_repeat_themselves(emulated, dtype):
    x, weight, bias, dy = layer(6, 8, 16, dtype)
    for expanded in (lambda it: it[:1].expand(it.shape), lambda it: it[:, :1].expand(it.shape)):
        x_, weight_, dy_ = (expanded(it) for it in (x, weight, dy))
        y, z = forward(x_, weight_, bias[:1].expand(16), "none", True)
        assert torch.equal(y, forward(x_.clone(), weight_.clone(), bias[:1].repeat(16), "none", True)[0])
        got = backward(dy_, x_, weight_, z, "none", dtype, F32)
        assert all(map(torch.equal, got, backward(dy_.clone(), x_.clone(), weight_.clone(), z, "none", dtype, F32)))


# Blocks of columns that are whole and not, of rows that are one, some, and so many that they grow longer.
SUMS = [(1, 8), (31, 264), (33, 256), (700, 40), (2000, 300), (8300, 264), (1100, 7), (2_200_000, 1)]


@pytest.mark.parametrize("dtype", [B16, F32], ids=str)
@pytest.mark.parametrize(("rows", "columns"), SUMS)
def test_sums_of_many_blocks(emulated, rows, columns, dtype):
    """No number goes through more than 2 sqrt(rows) additions, and each rounds a part of the sum of magnitudes."""
    dy = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(dtype)
    first, second = (backward(dy, None, None, dy.new_empty(0), "none", None, F32)[2] for _ in range(2))
    assert torch.equal(first, second)  # though blocks run in another order
    wide = dy.double()
    error, largest = (first - wide.sum(0)).abs(), 2 * rows**0.5 * torch.finfo(F32).eps / 2
    assert (error <= largest * wide.abs().sum(0)).all()
    rounded = backward(dy, None, None, dy.new_empty(0), "none", None, dtype)[2]
    assert torch.equal(rounded, first.to(dtype))


@pytest.mark.parametrize(("rows", "blocks"), [(33, 2), (2100, 3), (8300, 9)])
def test_the_more_sums_the_more_blocks_add_them_up(emulated, rows, blocks):
    """Of 264 columns, of which each of 256 threads takes 8. There are 2, 66 and 260 rows of sums."""
    dy = torch.ones(rows, 264)
    backward(dy, None, None, dy.new_empty(0), "none", None, F32)
    assert emulated_variable("emulation_blocks").value == blocks


def test_launches(emulated, monkeypatch):
    """A product and a pass; backward a pass and two products, and one more pass where there are partial sums."""
    monkeypatch.setattr(emulated_variable("emulation_l2_bytes"), "value", 50 << 20)  # which has room for all rows
    launches = emulated_variable("emulation_launches")

    def count(function, *arguments):
        before = launches.value
        function(*arguments)
        return launches.value - before

    for dtype in (B16, F32):
        x, weight, bias, dy = layer(32, 8, 16, dtype)
        assert count(forward, x, weight, bias, "gelu", True) == 2
        assert count(forward, x, weight, None, "none", True) == 1
        assert count(backward, dy, x, weight, dy, "gelu", dtype, dtype) == 3
        assert count(backward, dy, x, weight, dy, "gelu", dtype, None) == 3
        assert count(backward, dy, x, weight, dy.new_empty(0), "none", dtype, None) == 2
        assert count(backward, dy, None, None, dy, "gelu", None, dtype) == 1
        assert count(dact, x, weight.t(), dy, "gelu", dtype) == 2
        assert count(partial(dact, wants_h=True), x, weight.t(), dy, "gelu", dtype) == 2
        assert count(dact, x.repeat(100, 1), weight.t(), dy.repeat(100, 1), "gelu", dtype) == 3
        assert count(dact, x.repeat(100, 1), weight.t(), dy.repeat(100, 1), "gelu", None) == 2
        many = dy.repeat(100, 1)
        assert count(backward, many, None, None, many, "gelu", None, dtype) == 2


@pytest.fixture
def tf32():
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = "none"


def in_tf32(tensor):
    """Tensor cores take 10 bits behind the leading one."""
    mantissa, exponent = torch.frexp(tensor.double())
    return (torch.ldexp((mantissa * 2**11).round(), exponent - 11)).float()


def test_fp32_products_honour_tf32(emulated, tf32):
    x, weight, bias, dy = layer(6, 40, 7, F32)
    nothing = dy.new_empty(0)
    y, _ = forward(x, weight, bias, "none", False)
    dx, dweight, _ = backward(dy, x, weight, nothing, "none", F32, None)
    dz, _ = dact(x, weight.t(), nothing, "none", None)
    x_, weight_, dy_ = map(in_tf32, (x, weight, dy))
    torch.testing.assert_close(y, x_ @ weight_.t() + bias, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close((dx, dweight, dz), (dy_ @ weight_, dy_.t() @ x_, x_ @ weight_.t()), rtol=1e-5, atol=1e-5)
    assert (dz - x @ weight.t()).abs().max() > 1e-4


def test_16_bits_are_the_same_under_tf32(emulated, request):
    x, weight, bias, _ = layer(6, 40, 7, B16)
    plain = forward(x, weight, bias, "silu", True)
    request.getfixturevalue("tf32")
    assert all(map(torch.equal, forward(x, weight, bias, "silu", True), plain))


def test_each_status_of_cublas_is_an_error(emulated):
    failure, said = emulated_variable("emulation_calls_to_failure"), set()
    for call in itertools.count(1):
        failure.value = call
        try:
            forward(*ARGUMENTS["linear_act"]("cpu"))
        except RuntimeError as error:
            said.add(str(error).splitlines()[0])
        else:
            break
    failure.value = 0
    prefix = "linear_act: cuBLAS says CUBLAS_STATUS_"
    assert {
        f"{prefix}INTERNAL_ERROR in cublasSetMathMode",
        f"{prefix}INTERNAL_ERROR in cublasSetStream_v2",
        f"{prefix}INTERNAL_ERROR in cublasSetWorkspace_v2",
        f"{prefix}EXECUTION_FAILED in cublasGemmEx_64",
    } <= said


def test_a_process_without_cublas(emulated):
    """In one of its own, since what is found is kept: no library, then one that can't start, then one that can."""
    done = subprocess.run([sys.executable, "-m", __name__], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def start_without_cublas():
    assert TARGETS["cpu-cuda"].why_missing() is None
    has_cublas = emulated_variable("emulation_has_cublas")
    with TARGETS["cpu-cuda"].active():
        has_cublas.value = 0
        for name in ("linear_act", "linear_act_backward", "linear_dact"):
            with pytest.raises(RuntimeError, match=rf"{name}: this process has no cuBLAS.*backend\(\"triton\"\)"):
                _registry._ops[name](*ARGUMENTS[name]("cpu"))
        dy = torch.ones(3, 4)
        sums = backward(dy, None, None, dy.new_empty(0), "none", None, F32)[2]  # takes no product
        assert sums.tolist() == [3.0] * 4
        has_cublas.value = 1
        emulated_variable("emulation_calls_to_failure").value = 1
        with pytest.raises(RuntimeError, match="linear_act: cuBLAS says CUBLAS_STATUS_ALLOC_FAILED in cublasCreate_v2"):
            forward(*ARGUMENTS["linear_act"]("cpu"))
        forward(*ARGUMENTS["linear_act"]("cpu"))


if __name__ == "__main__":
    start_without_cublas()
