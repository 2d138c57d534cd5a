"""linear_act takes the arguments of F.linear and an activation, and computes the same."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from mpkernels import selector
from mpkernels.functional import linear_act
from mpkernels.linear import compute_block
from mpkernels.linear.key_and_case import key_in_any_size
from mpkernels.nn import LinearAct
from mpkernels.ops.linear.activations import ACTIVATIONS
from mpkernels.ops.linear.block_kind import Kind, Parameters
from tests.linear.choosing import CudaAutocast
from tests.linear_cases import layer, relative_error, results, torchs

B16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def shapes_of_x():
    base = torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(0))
    return {
        "one row": base[0, 0],
        "3-D": base,
        "4-D": base.view(2, 3, 5, 8),
        "transposed": base.transpose(0, 1),
        "columns first": base[0].t().contiguous().t(),
        "with gaps": torch.cat([base, base], 2)[::2, :, :8],
        "expanded rows": base[0, :1].expand(7, 8),
        "expanded features": base[0, :, :1].expand(5, 8),
        "off alignment": base.flatten()[1:41].view(5, 8),
        "empty batch": base[:, :0],
    }


@pytest.mark.parametrize("dtype", [F16, B16, F32], ids=str)
@pytest.mark.parametrize("name", shapes_of_x())
def test_x_may_have_any_shape_and_strides(target, name, dtype):
    x = shapes_of_x()[name].to(dtype).to(target.device)
    _, weight, bias, _ = layer(1, 8, 6, dtype, target.device)
    dy = torch.ones(*x.shape[:-1], 6, dtype=dtype, device=target.device)
    assert_near_torch(x, weight, bias, dy)


@pytest.mark.parametrize("dtype", [F16, B16, F32], ids=str)
def test_weight_and_bias_may_have_any_strides(target, dtype):
    x, weight, bias, dy = layer(7, 8, 6, dtype, target.device)
    for strange in (weight.t().contiguous().t(), torch.cat([weight, weight], 1)[:, ::2], weight[:1].expand(6, 8)):
        assert_near_torch(x, strange, bias, dy)
    for strange in (torch.stack([bias, bias], 1)[:, 0], bias[:1].expand(6)):
        assert_near_torch(x, weight, strange, dy)


def assert_near_torch(x, weight, bias, dy):
    got, want = (results(function, x, weight, bias, dy, "gelu") for function in (linear_act, torchs))
    for mine, torchs_own in zip(got, want, strict=True):
        assert mine.shape == torchs_own.shape
        assert relative_error(mine, torchs_own) <= 4 * torch.finfo(x.dtype).eps


def test_a_weight_may_have_one_dimension(target):
    x, weight, _, _ = layer(7, 8, 1, F32, target.device)
    for bias in (None, torch.ones((), device=target.device), torch.ones(1, device=target.device)):
        z = x @ weight[0] if bias is None else x @ weight[0] + bias  # F.linear has no 1-D weight together with a bias
        torch.testing.assert_close(linear_act(x, weight[0], bias), functional.gelu(z))


@pytest.mark.parametrize("activation", ["none", "gelu", "tanh"])
@pytest.mark.parametrize("shape", [(8,), (7, 8), (2, 3, 8), (2, 1, 3, 8), (0, 3, 8)], ids=str)
def test_a_weight_of_one_dimension_has_torchs_gradients(target, shape, activation):
    """With a 1-D weight, y has one dimension less than x."""
    x, (_, weight, bias, _) = torch.randn(shape, device=target.device), layer(1, 8, 1, F32, target.device)
    dy = torch.randn(shape[:-1], device=target.device)
    for one in (None, bias, bias[0]):
        got = results(linear_act, x, weight[0], one, dy, activation)
        want = results(lambda x, row, b, f: torchs(x, row[None], b, f).squeeze(-1), x, weight[0], one, dy, activation)
        torch.testing.assert_close(got, want)


def test_a_bias_of_one_element_has_torchs_gradient(target):
    x, weight, bias, _ = layer(7, 8, 6, F32, target.device)
    for one in (bias[:1], bias[0]):
        one = one.detach().requires_grad_()
        got, want = (torch.autograd.grad(f(x, weight, one, "silu").sum(), one)[0] for f in (linear_act, torchs))
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [F16, B16], ids=str)
@pytest.mark.parametrize("parameters", [F32, F16, B16], ids=str)
@pytest.mark.parametrize("inputs", [F32, F16, B16], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_autocast_gives_torchs_dtypes_and_numbers(target, dtype, parameters, inputs, bias):
    """Results and gradients have torch's dtypes, and torch's numbers."""
    x, weight, b, dy = layer(9, 8, 6, F32, target.device, bias=bias)
    x, weight, b = x.to(inputs), weight.to(parameters), None if b is None else b.to(parameters)
    with torch.autocast(target.device.type, dtype=dtype):
        got, want = (results(function, x, weight, b, dy.to(dtype), "gelu") for function in (linear_act, torchs))
    for mine, torchs_own in zip(got, want, strict=True):
        assert mine.dtype == torchs_own.dtype
        assert relative_error(mine, torchs_own) <= 4 * torch.finfo(B16).eps


@pytest.mark.parametrize("kernel", ["native", "torch"])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_cudas_autocast_gives_its_dtype_whatever_computes(activation, mode, kernel):
    """CUDA's autocast widens 16 bits to fp32 in more ops than the CPU's. Fake tensors need no GPU."""
    with FakeTensorMode(), mode(), CudaAutocast():
        arguments = (torch.empty(shape, device="cuda") for shape in ((3, 4), (5, 4), (5,)))
        x, *params = arguments
        assert compute_block.compute(kernel, Kind("linear_act", activation), x, Parameters(*params), B16).dtype == B16


def test_autocast_leaves_fp64_alone(target):
    arguments = layer(9, 8, 6, F64, target.device)
    with torch.autocast(target.device.type, dtype=B16):
        got, want = (results(function, *arguments, "gelu") for function in (linear_act, torchs))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_a_second_backward_under_autocast_gives_torchs_numbers(target):
    x, weight, bias, dy = (it.requires_grad_() for it in layer(9, 8, 6, F32, target.device))
    penalties = []
    for function in (linear_act, torchs):
        with torch.autocast(target.device.type, dtype=B16):
            y = function(x, weight, bias, "gelu")
            (dx,) = torch.autograd.grad(y, x, dy.to(B16), create_graph=True)
        penalties.append(torch.autograd.grad(dx.square().sum(), (x, weight, bias)))
    for mine, torchs_own in zip(*penalties, strict=True):
        assert mine.dtype == F32
        assert relative_error(mine, torchs_own) <= 8 * torch.finfo(B16).eps


def test_autocast_refuses_an_fp64_bias():
    x, weight, bias, _ = layer(3, 4, 5, F32)
    with torch.autocast("cpu", dtype=B16), pytest.raises((TypeError, RuntimeError)):
        linear_act(x, weight, bias.double())


def test_a_call_that_runs_out_of_memory_is_not_tried_again(monkeypatch):
    module, x, calls = LinearAct(8, 6), torch.randn(5, 8), []
    key = key_in_any_size(Kind("linear_act", "gelu"), x, (module.weight, module.bias))
    monkeypatch.setattr(selector, "left_to_torch", {key})

    def fail(*_):
        calls.append(1)
        raise torch.OutOfMemoryError("all is taken")

    monkeypatch.setattr(compute_block, "by_torch", fail)
    with pytest.raises(torch.OutOfMemoryError, match="all is taken"):
        module(x)
    assert len(calls) == 1
