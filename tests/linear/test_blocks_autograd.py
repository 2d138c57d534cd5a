"""What blocks keep for their backward, with frozen parts, second backwards and dropouts."""

import itertools

import pytest
import torch

import mpkernels
from mpkernels import selector
from mpkernels.functional import gated_linear, gated_mlp, linear_act, mlp
from mpkernels.ops.linear.activations import ACTIVATIONS
from tests.block_cases import BLOCKS, MLPS, arguments, results
from tests.linear.choosing import forget_choices
from tests.linear_cases import relative_error, transposed

B16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
EVERY = pytest.mark.parametrize("name", BLOCKS)


def saved_by(call):
    """Return the tensors that a call saves for its backward, by address, and its result."""
    saved = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda it: saved.setdefault(it.data_ptr(), it), lambda it: it):
        y = call()
    return saved, y


@pytest.mark.parametrize("activation", ACTIVATIONS)
@EVERY
def test_bytes_saved_are_half_of_torchs_or_less(target, name, activation):
    x, *parameters, _ = arguments(name, B16, (64, 3, 50, 4), target.device)
    leaves = [it.requires_grad_() for it in (x, *parameters)]

    def spent(function, **options):
        saved, _ = saved_by(lambda: function(activation, *leaves, **options))
        return sum(it.nbytes for address, it in saved.items() if address not in {it.data_ptr() for it in leaves})

    hidden = 64 * 50
    keeps_nothing = "linear_act" in name and activation == "none"
    assert spent(BLOCKS[name].ours) == (0 if keeps_nothing else BLOCKS[name].bytes_saved * hidden)
    if name in MLPS:
        if activation in ("silu", "gelu", "gelu_tanh"):
            assert spent(BLOCKS[name].ours) * 2 <= spent(BLOCKS[name].torchs)
        assert spent(BLOCKS[name].ours, recompute=True) == 0
        assert spent(BLOCKS[name].ours, dropout=0.5) == (BLOCKS[name].bytes_saved + 1) * hidden


@pytest.mark.parametrize("name", MLPS)
def test_with_recompute_torch_saves_only_arguments_in_each_call(monkeypatch, name):
    """The second call finds its kernel by its key."""
    forget_choices(monkeypatch)
    selector.pin("torch")
    *leaves, _ = (it.requires_grad_() for it in arguments(name, F32))
    for _ in range(2):
        saved, _ = saved_by(lambda: BLOCKS[name].ours("gelu", *leaves, recompute=True))
        assert saved.keys() <= {it.data_ptr() for it in leaves}


@pytest.mark.parametrize("options", [{}, {"recompute": True}], ids=str)
@EVERY
def test_each_gradient_is_the_same_whatever_else_is_frozen(target, name, options):
    if options and name not in MLPS:
        return
    *leaves, dy = arguments(name, B16, device=target.device)
    every = results(BLOCKS[name].ours, "gelu", leaves, dy, **options)[1:]
    for wanted in itertools.product([True, False], repeat=len(leaves)):
        if not any(wanted):
            continue
        these = [it.detach().requires_grad_(need) for it, need in zip(leaves, wanted, strict=True)]
        y = BLOCKS[name].ours("gelu", *these, **options)
        y.backward(dy)
        for it, need, want in zip(these, wanted, every, strict=True):
            assert (it.grad is not None) == need
            if need and not (name == "mlp" and it is these[2]):  # its sums may come from another kernel
                assert relative_error(it.grad, want) <= torch.finfo(B16).eps


@pytest.mark.parametrize("name", ["linear_act", "gated mlp"])
def test_a_frozen_block_keeps_no_x(target, name):
    x, *parameters, _ = arguments(name, B16, device=target.device)
    saved, _ = saved_by(lambda: BLOCKS[name].ours("silu", x.requires_grad_(), *parameters))
    assert x.data_ptr() not in saved


def test_a_layer_keeps_no_weight_if_x_wants_no_gradient(target):
    x, weight, bias, _ = arguments("linear_act", B16, device=target.device)
    saved, _ = saved_by(lambda: linear_act(x, weight.requires_grad_(), bias, "silu"))
    assert weight.data_ptr() not in saved


@pytest.mark.parametrize("dtype", [B16, F32], ids=str)
@pytest.mark.parametrize("activation", ["silu", "relu", "none"])
@pytest.mark.parametrize("options", [{}, {"recompute": True}], ids=str)
@EVERY
def test_a_graph_can_be_used_twice_and_differentiated_twice(target, name, activation, options, dtype):
    if options and name not in MLPS:
        return
    *leaves, dy = arguments(name, dtype, device=target.device)
    eps = torch.finfo(dtype).eps

    def penalty(function, leaves, dy, **options):
        leaves = [it.detach().requires_grad_() for it in leaves]
        y = function(activation, *leaves, **options)
        first = torch.autograd.grad(y, leaves, dy, retain_graph=True)
        again = torch.autograd.grad(y, leaves, dy, create_graph=True)
        for one, other in zip(first, again, strict=True):
            assert relative_error(one, other) <= 16 * eps
        loss = sum(it.to(torch.promote_types(it.dtype, F32)).square().sum() for it in again)
        return torch.autograd.grad(loss, leaves, materialize_grads=True, allow_unused=True)

    got = penalty(BLOCKS[name].ours, leaves, dy, **options)
    want = penalty(BLOCKS[name].torchs, [it.double().cpu() for it in leaves], dy.double().cpu())
    for mine, oracle in zip(got, want, strict=True):
        assert relative_error(mine, oracle) <= 32 * eps


@pytest.mark.each_value_once
@pytest.mark.parametrize("options", [{}, {"recompute": True}], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@EVERY
def test_a_second_derivative_exists_where_torch_has_one_whatever_is_frozen(name, activation, options):
    """Also where it is 0, as through ReLU's slope: a penalty on gradients would raise there."""
    if options and name not in MLPS:
        return
    *leaves, dy = arguments(name, F32)

    def penalty(function, wanted, leaves, dy, **options):
        leaves = [it.detach().requires_grad_(need) for it, need in zip(leaves, wanted, strict=True)]
        trained = [it for it in leaves if it.requires_grad]
        first = torch.autograd.grad(function(activation, *leaves, **options), trained, dy, create_graph=True)
        loss = sum(it.square().sum() for it in first)
        if not loss.requires_grad:
            return None
        return torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True)

    for wanted in itertools.product([True, False], repeat=len(leaves)):
        if any(wanted):
            with mpkernels.backend("native"):
                got = penalty(BLOCKS[name].ours, wanted, leaves, dy, **options)
            want = penalty(BLOCKS[name].torchs, wanted, leaves, dy)
            if want is None:  # ours may be 0 there: gate and up are kept as one tensor
                assert got is None or not any(it.any() for it in got), wanted
            else:
                torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def test_the_backward_refuses_a_kept_tensor_that_was_written_to(target):
    *leaves, dy = (it.requires_grad_() for it in arguments("mlp", B16, device=target.device))
    y = BLOCKS["mlp"].ours("gelu", *leaves)
    with torch.no_grad():
        leaves[3].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


def test_a_second_backward_after_a_step_is_refused():
    *leaves, dy = (it.requires_grad_() for it in arguments("mlp", F32))
    with mpkernels.backend("native"), torch.autocast("cpu", B16):
        y = BLOCKS["mlp"].ours("gelu", *leaves)
    with torch.no_grad():
        leaves[1].mul_(2)
    torch.autograd.grad(y, leaves[1], dy.to(B16), retain_graph=True)  # needs only the cast
    with pytest.raises(RuntimeError, match="mlp: a weight was modified in place before a second backward"):
        torch.autograd.grad(y, leaves[0], dy.to(B16), create_graph=True)


@pytest.mark.parametrize("p", [0.4, 1.0])
@pytest.mark.parametrize("name", MLPS)
def test_gradients_and_recomputing_use_the_dropout_mask_of_the_forward(target, name, p):
    """The gradients are those of the mask that the forward drew."""
    *leaves, dy = arguments(name, F32, (9, 8, 40, 7), target.device)
    leaves = [it.requires_grad_() for it in leaves]

    def y(**options):
        torch.manual_seed(3)
        return BLOCKS[name].ours("silu", *leaves, dropout=p, **options)

    assert torch.equal(y(training=False), BLOCKS[name].ours("silu", *leaves))
    assert not torch.equal(y(), y(training=False))
    assert torch.equal(y(), y(recompute=True))
    gradients = torch.autograd.grad(y(), leaves, dy)
    again = torch.autograd.grad(y(recompute=True), leaves, dy)
    twice = torch.autograd.grad(y(), leaves, dy, create_graph=True)
    for got, other, third in zip(gradients, again, twice, strict=True):
        torch.testing.assert_close(got, other)
        torch.testing.assert_close(got, third)
    step, direction = 1e-2, torch.randn_like(leaves[1])
    with torch.no_grad():
        leaves[1] += step * direction
        above = (y() * dy).sum()
        leaves[1] -= 2 * step * direction
        below = (y() * dy).sum()
    torch.testing.assert_close((above - below) / (2 * step), (gradients[1] * direction).sum(), rtol=0.01, atol=0.01)


LAYOUTS = {
    "rows": lambda it: it,
    "columns": transposed,
    "a part of rows": lambda it: torch.cat((it, it), 1)[:, ::2],
    "a part of columns": lambda it: transposed(torch.cat((it, it)))[: len(it)],
    "one row": lambda it: it[:1].expand(len(it), -1),
}


@pytest.mark.parametrize("dtype", [B16, F32], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["linear_act", "gated_linear", "mlp", "gated_mlp"])
def test_a_weights_gradient_lies_as_the_weight_lies(target, name, layout, dtype):
    """Adding grads up is then one pass over memory. If the weight has gaps or overlaps, the gradient lies by rows."""
    shapes = (5, 8), (6, 8), (6, 8), (8, 6)
    x, up, gate, down = (torch.randn(*shape, device=target.device, dtype=dtype) for shape in shapes)
    up, gate, down = (LAYOUTS[layout](it).requires_grad_() for it in (up, gate, down))
    calls = {
        "linear_act": (lambda: linear_act(x, up, None, "silu"), (up,)),
        "gated_linear": (lambda: gated_linear(x, gate, up), (gate, up)),
        "mlp": (lambda: mlp(x, up, None, down, None), (up, down)),
        "gated_mlp": (lambda: gated_mlp(x, gate, up, down), (gate, up, down)),
    }
    call, weights = calls[name]
    for weight, grad in zip(weights, torch.autograd.grad(call().sum(), weights), strict=True):
        assert grad.stride() == (weight.stride() if layout == "columns" else (weight.shape[1], 1))
