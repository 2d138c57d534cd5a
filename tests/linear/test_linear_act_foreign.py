"""Code that was written for torch's layers works the same with ours."""

from functools import partial

import pytest
import torch
from torch._dynamo import config as dynamo_config
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import mpkernels
from mpkernels import selector
from mpkernels.functional import linear_act
from mpkernels.linear import key_and_case
from mpkernels.nn import LinearAct
from mpkernels.ops import _registry
from tests.linear.choosing import empty_selector

B16 = torch.bfloat16


@pytest.fixture(autouse=True)
def selector_is_empty(monkeypatch):
    empty_selector(monkeypatch)


def sequential(layer):
    linear = torch.nn.Linear(layer.in_features, layer.out_features)
    linear.weight, linear.bias = layer.weight, layer.bias
    return torch.nn.Sequential(linear, {"gelu": torch.nn.GELU, "relu": torch.nn.ReLU}[layer.activation]())


SHAPES = [(8,), (5, 8), (2, 3, 8), (0, 8)]


@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_result_may_be_changed_in_place(target, shape, activation):
    """Like F.linear's, the result is no view."""
    selector.pin("native")
    layer, x = LinearAct(8, 6, activation=activation, device=target.device), torch.randn(shape, device=target.device)
    learned = torch.nn.Parameter(torch.randn(6, device=target.device))
    with torch.no_grad():
        y = layer(x)
    assert not y._is_view()
    y += learned  # a frozen layer, and a part that is trained
    y.sum().backward()
    assert learned.grad is not None
    layer(x).detach_()
    y = checkpoint(layer, x.requires_grad_(), use_reentrant=True)
    y += 1
    y.sum().backward()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_backward_refuses_a_saved_result_that_was_changed(target, shape):
    """relu's backward needs y."""
    selector.pin("native")
    y = LinearAct(8, 6, activation="relu", device=target.device)(torch.randn(shape, device=target.device))
    y += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_dy_may_have_any_strides(target):
    selector.pin("native")
    layer, x = LinearAct(8, 6, device=target.device), torch.randn(2, 3, 8, device=target.device)
    dy, parameters = torch.randn(6, 3, 2, device=target.device).permute(2, 1, 0), list(layer.parameters())
    got, want = (torch.autograd.grad(module(x), parameters, dy) for module in (layer, sequential(layer).to(x.device)))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kernel", ["native", "torch"])
def test_a_checkpoint_computes_the_same_twice(kernel):
    """The mode is there only in the first run. Another kernel in the second run would save other tensors."""
    selector.pin(kernel)
    layer, x = LinearAct(8, 8, activation="relu"), torch.randn(4, 8, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        y = checkpoint(layer, x, use_reentrant=False)
    assert counter.get_total_flops() == 2 * 4 * 8 * 8
    leaves = [x, layer.weight, layer.bias]
    got = torch.autograd.grad(y.square().sum(), leaves)
    torch.testing.assert_close(got, torch.autograd.grad(sequential(layer)(x).square().sum(), leaves))


def test_a_layer_that_was_made_in_inference_mode_computes_as_torchs():
    with torch.inference_mode():
        layer = LinearAct(8, 6)
    selector.pin("native")
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        x = torch.randn(3, 8)
        with mode(), torch.autocast("cpu", B16):
            got, want = layer(x), sequential(layer)(x)
        assert got.dtype == B16
        torch.testing.assert_close(got, want)
    x = torch.randn(3, 8, requires_grad=True)
    with torch.autocast("cpu", B16):
        (dx,) = torch.autograd.grad(layer(x).sum(), x)
        (want,) = torch.autograd.grad(sequential(layer)(x).sum(), x)
    torch.testing.assert_close(dx, want, rtol=0.02, atol=0.02)  # bf16 has 8 bits, and rounds twice


def negative(*shape):
    return torch.randn(shape, dtype=torch.complex64).conj().imag


@pytest.fixture
def by_triton(monkeypatch):
    """Make Triton's kernel the choice, as if ``tune`` had found it the fastest."""
    pytest.importorskip("triton")
    if "triton" not in mpkernels.backends("linear_act"):
        pytest.skip("Triton is not interpreted here")
    case_of = key_and_case._case
    monkeypatch.setattr(key_and_case, "_case", lambda *call: case_of(*call)._replace(kernels=("triton", "torch")))
    selector.pin("triton")
    return LinearAct(8, 6)


def test_triton_gets_lazily_negated_tensors_negated(by_triton):
    """The dispatcher negates a lazily negated tensor in memory before the kernel runs."""
    theirs, x = sequential(by_triton), negative(5, 8)
    assert x.is_neg()
    torch.testing.assert_close(by_triton(x), theirs(x))
    dy, parameters = negative(5, 6), list(by_triton.parameters())
    got, want = (torch.autograd.grad(layer(x), parameters, dy) for layer in (by_triton, theirs))
    torch.testing.assert_close(got, want)


def test_triton_is_called_in_each_grad_mode(by_triton, monkeypatch):
    called = []
    by_triton(torch.randn(5, 8))
    for name, kernel in list(_registry._triton_kernels.items()):

        def run(*arguments, kernel=kernel):
            called.append(kernel)
            return kernel(*arguments)

        monkeypatch.setitem(_registry._triton_kernels, name, run)
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with mode():
            by_triton(torch.randn(5, 8))
    assert len(called) == 3


def test_triton_computes_batched_grads(by_triton):
    x = torch.randn(5, 8)
    got, want = (
        torch.autograd.functional.jacobian(layer, x, vectorize=True) for layer in (by_triton, sequential(by_triton))
    )
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_tracing_keeps_sizes_as_symbols(activation):
    """torch.compile keeps the sizes of the rows as symbols, and those of a weight that is an input of the graph."""
    layer, x = LinearAct(3, 4, activation=activation), torch.randn(9, 3)
    traced = partial(make_fx, tracing_mode="symbolic", _allow_non_fake_inputs=True)
    counted = traced(lambda x: layer(x) + x.shape[0])(torch.randn(6, 3))
    torch.testing.assert_close(counted(x), layer(x) + 9)
    params, others = (dict(it.named_parameters()) for it in (layer, LinearAct(5, 7, activation=activation)))
    called = traced(lambda params, x: functional_call(layer, params, (x,)))(others, torch.randn(6, 5))
    torch.testing.assert_close(called(params, x), layer(x))


def test_tracing_does_not_compare_symbols_with_the_sizes_of_tuned_calls():
    layer, other, x = LinearAct(3, 4), LinearAct(5, 7), torch.randn(9, 3)
    other(torch.randn(6, 5))
    [case] = selector._chosen
    selector.tuned[case] = "native"
    traced = make_fx(lambda params, x: functional_call(layer, params, (x,)), tracing_mode="symbolic")
    called = traced(dict(other.named_parameters()), torch.randn(6, 5))
    torch.testing.assert_close(called(dict(layer.named_parameters()), x), layer(x))


def test_a_compiled_graph_takes_a_number_of_rows_that_depends_on_data():
    layer, x = LinearAct(3, 4), torch.randn(6, 3)
    compiled = torch.compile(lambda x, rows: layer(x[rows.nonzero().squeeze(1)]), fullgraph=True, backend="aot_eager")
    with dynamo_config.patch(capture_dynamic_output_shape_ops=True):
        for rows in (torch.tensor([1, 0, 1, 1, 0, 1]), torch.tensor([0, 0, 1, 0, 0, 1])):
            torch.testing.assert_close(compiled(x, rows), layer(x[rows.bool()]))
    torch.compiler.reset()


@pytest.mark.parametrize("weight", [torch.randn(5, 3, dtype=torch.float64), torch.randn(3)], ids=["fp64", "one row"])
def test_a_call_that_torch_computes_is_torchs_when_compiled(weight):
    x = torch.randn(4, 3, dtype=weight.dtype)
    compiled = torch.compile(linear_act, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, weight), torch.nn.functional.gelu(torch.nn.functional.linear(x, weight)))
    torch.compiler.reset()
