import inspect
import itertools

import pytest
import torch

import mpkernels
from mpkernels.functional import linear_act
from mpkernels.ops.linear.activations import ACTIVATIONS
from tests.linear_cases import layer, relative_error, results, torchs

HALVES = (torch.float16, torch.bfloat16)
EVERY = pytest.mark.parametrize("activation", ACTIVATIONS)


def leaves(*shape, dtype=torch.float64, device="cpu", bias=True):
    *arguments, dy = layer(*shape, dtype, device, bias=bias)
    return [it.requires_grad_() for it in arguments if it is not None], dy


@EVERY
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_gradcheck_and_gradgradcheck(activation, bias):
    arguments, _ = leaves(3, 4, 5, bias=bias)

    def function(x, weight, bias=None):
        return linear_act(x, weight, bias, activation)

    torch.autograd.gradcheck(function, arguments)
    torch.autograd.gradgradcheck(function, arguments)


@EVERY
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
def test_a_second_backward_in_every_dtype(target, activation, dtype):
    """A gradient penalty."""

    def penalty(function, dtype, device):
        (x, weight, bias), dy = leaves(6, 8, 10, dtype=dtype, device=device)
        (dx,) = torch.autograd.grad(function(x, weight, bias, activation), x, dy, create_graph=True)
        loss = dx.float().square().sum() if dtype != torch.float64 else dx.square().sum()
        return torch.autograd.grad(loss, (x, weight, bias), materialize_grads=True)

    got, want = penalty(linear_act, dtype, target.device), penalty(torchs, torch.float64, "cpu")
    for mine, oracle in zip(got, want, strict=True):
        assert relative_error(mine, oracle) <= 16 * torch.finfo(dtype).eps


@EVERY
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_two_bytes_are_saved_for_each_output(target, activation, dtype):
    (x, weight, bias), _ = leaves(64, 3, 50, dtype=dtype, device=target.device)
    saved = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda it: saved.setdefault(it.data_ptr(), it), lambda it: it):
        y = linear_act(x, weight, bias, activation)
    others = {it.data_ptr() for it in (x, weight, bias)}
    spent = sum(it.nbytes for address, it in saved.items() if address not in others)
    assert spent == (0 if activation == "none" else 2 * y.numel())


def test_nothing_is_saved_without_grad(target):
    (x, weight, bias), _ = leaves(4, 3, 5, dtype=torch.bfloat16, device=target.device)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda it: it), torch.no_grad():
        assert not linear_act(x, weight, bias).requires_grad
    assert not saved


@pytest.mark.parametrize("activation", ["none", "gelu", "sigmoid"])
@pytest.mark.parametrize("wanted", [*itertools.product([True, False], repeat=3)][:-1], ids=str)
def test_frozen_in_every_combination(target, wanted, activation):
    """Among them the bias alone, whose gradient some leave unsummed."""
    x, weight, bias, dy = layer(9, 8, 6, torch.bfloat16, target.device)
    all_of_them = results(linear_act, x, weight, bias, dy, activation)[1:]
    arguments = [it.requires_grad_(need) for it, need in zip((x, weight, bias), wanted, strict=True)]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda it: saved.append(it.data_ptr()) or it, lambda it: it):
        y = linear_act(*arguments, activation)
    assert (x.data_ptr() in saved, weight.data_ptr() in saved) == (wanted[1], wanted[0])
    y.backward(dy)
    for argument, need, want in zip(arguments, wanted, all_of_them, strict=True):
        assert (argument.grad is not None) == need
        if need:
            assert torch.equal(argument.grad, want)


@EVERY
def test_backward_twice_over_one_graph(target, activation):
    """Other libraries' backward writes over what forward saved, and is silently wrong the second time."""
    arguments, dy = leaves(9, 8, 6, dtype=torch.bfloat16, device=target.device)
    y = linear_act(*arguments, activation)
    first = torch.autograd.grad(y, arguments, dy, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(y, arguments, dy)))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, arguments, dy)


@pytest.mark.parametrize("which", ["x", "weight", "y"])
def test_what_backward_needs_must_not_be_written_to(target, which):
    (x, weight, bias), dy = leaves(9, 8, 6, dtype=torch.bfloat16, device=target.device)
    y = linear_act(x, weight, bias, "tanh")
    with torch.no_grad():
        {"x": x, "weight": weight, "y": y}[which].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_fp32_gradients_of_16_bit_weights(target, dtype):
    """They are the sums themselves, of more bits than 16."""
    x, weight, bias, dy = layer(70, 8, 6, dtype, target.device)
    _, _, rounded, rounded_bias = results(linear_act, x, weight, bias, dy, "gelu")
    weight, bias = (torch.nn.Parameter(it.detach()) for it in (weight, bias))
    weight.grad_dtype = bias.grad_dtype = torch.float32
    linear_act(x.detach(), weight, bias, "gelu").backward(dy)
    assert weight.grad.dtype == bias.grad.dtype == torch.float32
    for got, narrow in ((weight.grad, rounded), (bias.grad, rounded_bias)):
        assert not torch.equal(got, got.to(dtype).float())
        assert relative_error(narrow, got) <= 2 * torch.finfo(dtype).eps


@EVERY
def test_expanded_and_strided_gradients(target, activation):
    x, weight, bias, dy = layer(9, 8, 6, torch.bfloat16, target.device)
    for strange in (dy[:1, :1].expand(9, 6), dy.t().contiguous().t(), torch.stack([dy, dy], 2)[..., 1]):
        want = results(linear_act, x, weight, bias, strange.contiguous(), activation)
        assert all(map(torch.equal, results(linear_act, x, weight, bias, strange, activation), want))


@pytest.mark.each_value_once
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@EVERY
def test_compiles_without_a_graph_break(target, activation, dtype):
    arguments, _ = leaves(4, 3, 5, dtype=dtype, device=target.device)

    def loss(*arguments):
        return linear_act(*arguments, activation).square().sum()

    want = torch.autograd.grad(loss(*arguments), arguments)
    got = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(*arguments), arguments)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    torch.compiler.reset()


@EVERY
def test_torch_func(activation):
    (x, weight, bias), _ = leaves(4, 3, 5)
    x, weight, bias = (it.detach() for it in (x, weight, bias))

    def per_row(function):
        gradients = torch.func.grad(lambda weight, row: function(row, weight, bias, activation).square().sum())
        return torch.func.vmap(gradients, in_dims=(None, 0))(weight, x)

    torch.testing.assert_close(per_row(linear_act), per_row(torchs))
    twice = [
        torch.func.grad(
            lambda x, f=f: torch.func.grad(lambda x: f(x, weight, bias, activation).sum())(x).square().sum()
        )(x)
        for f in (linear_act, torchs)
    ]
    torch.testing.assert_close(*twice)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("grad_dtype", [None, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_gradient_has_the_width_that_its_parameter_asks_for(target, dtype, grad_dtype):
    (x, weight, bias), dy = leaves(3, 4, 5, dtype=dtype, device=target.device)
    weight.grad_dtype = grad_dtype
    linear_act(x, weight, bias).backward(dy)
    assert weight.grad.dtype == (grad_dtype or dtype)


def test_a_weight_that_a_second_backward_needs_as_it_was():
    weight = torch.nn.Parameter(torch.randn(6, 8))
    x = torch.randn(5, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16), mpkernels.backend("reference"):
        y = linear_act(x, weight)
        with torch.no_grad():
            weight.add_(1)
        with pytest.raises(RuntimeError, match="weight was modified in place before a second backward"):
            torch.autograd.grad(y.sum(), x, create_graph=True)


def test_the_host_does_not_look_up_how_forward_is_called(monkeypatch):
    """As autograd's Function.apply does, which takes longer than both kernels of a small layer."""
    (x, weight, bias), dy = leaves(3, 4, 5, dtype=torch.float32)
    linear_act(x, weight, bias).backward(dy)  # what is imported only now may look
    monkeypatch.setattr(inspect, "signature", None)
    y = linear_act(x, weight, bias)
    assert type(y.grad_fn).__name__ == "_BlockBackward"
    y.backward(dy)
