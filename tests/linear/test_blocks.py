"""gated_linear, mlp and gated_mlp compute what torch's functions do, and keep less."""

import itertools
import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional

import mpkernels
from mpkernels import selector
from mpkernels.functional import gated_linear, gated_mlp, mlp
from mpkernels.linear import block_choice, cast_cache
from mpkernels.ops.linear.activations import ACTIVATIONS
from tests.block_cases import BLOCKS, MLPS, arguments, assert_contract, results
from tests.linear_cases import relative_error, transposed

B16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
DTYPES = [F16, B16, F32]
EVERY = pytest.mark.parametrize("name", BLOCKS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@EVERY
def test_error_contract(target, name, activation, dtype):
    sizes = (65, 24, 33, 21) if target.is_interpreted else (130, 75, 97, 66)
    *leaves, dy = arguments(name, dtype, sizes, target.device)
    assert_contract(name, activation, leaves, dy)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from([*BLOCKS]),
    sizes=st.tuples(*[st.integers(1, 150)] * 4),
    dtype=st.sampled_from(DTYPES),
    activation=st.sampled_from(["silu", "gelu", "relu"]),
    seed=st.integers(0, 1000),
)
def test_error_contract_at_any_shape(target, name, sizes, dtype, activation, seed):
    if target.is_interpreted:
        sizes = [1 + size % 40 for size in sizes]
    *leaves, dy = arguments(name, dtype, sizes, target.device, seed)
    assert_contract(name, activation, leaves, dy)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MLPS)
def test_recomputing_changes_no_bit(target, name, dtype):
    *leaves, dy = arguments(name, dtype, device=target.device)
    got, want = (results(BLOCKS[name].ours, "gelu", leaves, dy, recompute=again) for again in (True, False))
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("rows", [(2, 3), (2, 1, 3), (0, 3), ()], ids=str)
@EVERY
def test_any_number_of_dimensions(target, name, rows):
    x, *parameters, dy = arguments(name, F32, device=target.device)
    x, dy = (it[:1].expand(*rows, -1) if rows else it[0] for it in (x, dy))
    got, want = (results(f, "silu", [x, *parameters], dy) for f in BLOCKS[name][:2])
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("sizes", [(0, 3, 5, 4), (4, 0, 5, 3), (4, 3, 0, 5), (4, 3, 5, 0)], ids=str)
@EVERY
def test_empty_in_any_dimension(target, name, sizes):
    *leaves, dy = arguments(name, B16, sizes, target.device)
    got, want = (results(f, "silu", leaves, dy) for f in BLOCKS[name][:2])
    for mine, torchs_own in zip(got, want, strict=True):
        assert mine.shape == torchs_own.shape
        assert relative_error(mine, torchs_own) <= 4 * torch.finfo(B16).eps


@pytest.mark.parametrize("dtype", [B16, F32], ids=str)
@EVERY
def test_weights_in_any_layout(target, name, dtype):
    x, *parameters, dy = arguments(name, dtype, (16, 32, 48, 24), target.device)
    strange = [transposed(it) if it.dim() == 2 else it for it in parameters]
    got, want = (results(BLOCKS[name].ours, "silu", [x, *those], dy) for those in (strange, parameters))
    for mine, plain in zip(got, want, strict=True):
        assert relative_error(mine, plain) <= 2 * torch.finfo(dtype).eps


def saved_by(call):
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
    assert spent(BLOCKS[name].ours) == BLOCKS[name].bytes_saved * hidden
    if name in MLPS:
        if activation in ("silu", "gelu", "gelu_tanh"):
            assert spent(BLOCKS[name].ours) * 2 <= spent(BLOCKS[name].torchs)
        assert spent(BLOCKS[name].ours, recompute=True) == 0
        assert spent(BLOCKS[name].ours, dropout=0.5) == (BLOCKS[name].bytes_saved + 1) * hidden


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", MLPS)
def test_frozen_in_every_combination(target, name, recompute):
    *leaves, dy = arguments(name, B16, device=target.device)
    every = results(BLOCKS[name].ours, "gelu", leaves, dy, recompute=recompute)[1:]
    for wanted in itertools.product([True, False], repeat=len(leaves)):
        if not any(wanted):
            continue
        these = [it.detach().requires_grad_(need) for it, need in zip(leaves, wanted, strict=True)]
        y = BLOCKS[name].ours("gelu", *these, recompute=recompute)
        y.backward(dy)
        for it, need, want in zip(these, wanted, every, strict=True):
            assert (it.grad is not None) == need
            if need and not (it is these[2] and name == "mlp"):  # whose sums another kernel may take
                assert relative_error(it.grad, want) <= torch.finfo(B16).eps


def test_a_frozen_block_keeps_no_x(target):
    x, *parameters, _ = arguments("gated mlp", B16, device=target.device)
    saved, _ = saved_by(lambda: BLOCKS["gated mlp"].ours("silu", x.requires_grad_(), *parameters))
    assert x.data_ptr() not in saved


@pytest.mark.parametrize("activation", ["silu", "relu", "none"])
@pytest.mark.parametrize("options", [{}, {"recompute": True}], ids=str)
@EVERY
def test_backward_twice_over_one_graph_and_a_second_backward(target, name, activation, options):
    *leaves, dy = arguments(name, F32, device=target.device)
    if options and name not in MLPS:
        return

    def penalty(function, leaves, dy, **options):
        leaves = [it.detach().requires_grad_() for it in leaves]
        y = function(activation, *leaves, **options)
        first = torch.autograd.grad(y, leaves, dy, retain_graph=True)
        again = torch.autograd.grad(y, leaves, dy, create_graph=True)
        for one, other in zip(first, again, strict=True):
            torch.testing.assert_close(one, other)
        loss = sum(it.square().sum() for it in again)
        return torch.autograd.grad(loss, leaves, materialize_grads=True, allow_unused=True)

    got = penalty(BLOCKS[name].ours, leaves, dy, **options)
    want = penalty(BLOCKS[name].torchs, [it.double().cpu() for it in leaves], dy.double().cpu())
    for mine, oracle in zip(got, want, strict=True):
        assert relative_error(mine, oracle) <= 32 * torch.finfo(F32).eps


def test_what_is_kept_must_not_be_written_to(target):
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
    torch.autograd.grad(y, leaves[1], dy.to(B16), retain_graph=True)  # needs the cast alone
    with pytest.raises(RuntimeError, match="mlp: a weight was modified in place before a second backward"):
        torch.autograd.grad(y, leaves[0], dy.to(B16), create_graph=True)


@EVERY
def test_relus_slope_is_0_at_0(target, name):
    x, *parameters, dy = arguments(name, F32, device=target.device)
    got, want = (results(f, "relu", [torch.zeros_like(x), *parameters], dy) for f in BLOCKS[name][:2])
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@EVERY
def test_what_is_not_finite_is_seen(target, name, dtype, value):
    x, *parameters, dy = arguments(name, dtype, device=target.device)
    x[1, 2] = value
    for activation in ("relu", "silu"):
        y, dx, *_ = results(BLOCKS[name].ours, activation, [x, *parameters], dy)
        assert not y[1].isfinite().all()
        assert y[[0, 2, 3, 4, 5]].isfinite().all()
        assert dx[[0, 2, 3, 4, 5]].isfinite().all()
        if value != value:
            assert y[1].isnan().any()
            assert dx[1].isnan().any() or activation == "relu"  # whose slope at NaN is 1, as torch's


@pytest.mark.parametrize("dtype", [F16, B16], ids=str)
@EVERY
def test_autocast(target, name, dtype):
    """The same dtypes as torch, the casts kept, and weight gradients that were never rounded to 16 bits."""
    *leaves, dy = arguments(name, F32, (65, 8, 10, 7), target.device)
    with torch.autocast(target.device.type, dtype=dtype):
        got, want = (results(f, "silu", leaves, dy.to(dtype)) for f in BLOCKS[name][:2])
    exact = results(BLOCKS[name].torchs, "silu", [it.double().cpu() for it in leaves], dy.double().cpu())
    for mine, torchs_own, oracle in zip(got, want, exact, strict=True):
        assert mine.dtype == torchs_own.dtype
        assert relative_error(mine, oracle) <= 4 * torch.finfo(dtype).eps
    assert not torch.equal(got[2], got[2].to(dtype).float())


@EVERY
def test_autocast_casts_once(monkeypatch, name):
    x, *parameters, _ = arguments(name, F32)
    parameters = [torch.nn.Parameter(it.t().contiguous() if it.dim() == 2 else it) for it in parameters]
    casts, cast = [], cast_cache.cast
    monkeypatch.setattr(cast_cache, "cast", lambda *which: casts.append(cast(*which)) or casts[-1])
    with mpkernels.backend("native"), torch.autocast("cpu", B16):
        for _ in range(2):
            BLOCKS[name].ours("silu", x, *(it.t() if it.dim() == 2 else it for it in parameters))
    assert len({it.data_ptr() for it in casts}) == len(parameters)


@pytest.mark.parametrize("p", [0.4, 1.0])
@pytest.mark.parametrize("name", MLPS)
def test_dropout(target, name, p):
    """The gradients are those of the mask that forward drew."""
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


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile does it itself
@pytest.mark.parametrize("kernel", ["native", "torch"])
@pytest.mark.parametrize("dtype", [B16, F32], ids=str)
@EVERY
def test_compiles_without_a_graph_break(name, dtype, kernel):
    *leaves, dy = arguments(name, dtype)
    selector.pin(kernel)
    try:
        want = results(BLOCKS[name].ours, "gelu", leaves, dy)
        compiled = torch.compile(BLOCKS[name].ours, fullgraph=True, backend="aot_eager")
        for mine, eager in zip(results(compiled, "gelu", leaves, dy), want, strict=True):
            assert relative_error(mine, eager) <= 4 * torch.finfo(dtype).eps
    finally:
        selector.pin(None)
        torch.compiler.reset()


@EVERY
def test_func_transforms_and_export(name):
    x, *parameters, dy = arguments(name, F64)
    ours, torchs = BLOCKS[name][:2]
    with mpkernels.backend("native"):
        got, want = (torch.func.grad(lambda x, f=f: (f("silu", x, *parameters) * dy).sum())(x) for f in (ours, torchs))
        torch.testing.assert_close(got, want)
        got, want = (torch.func.vmap(lambda x, f=f: f("silu", x, *parameters))(x) for f in (ours, torchs))
        torch.testing.assert_close(got, want)
        _, tangent = torch.func.jvp(lambda x: ours("silu", x, *parameters), (x,), (torch.ones_like(x),))
        assert tangent.isfinite().all()

    class Module(torch.nn.Module):
        def forward(self, x):
            return ours("silu", x, *parameters)

    exported = torch.export.export(Module(), (x,))
    assert "mpkernels" not in str(exported.graph)
    torch.testing.assert_close(exported.module()(x), torchs("silu", x, *parameters))


@EVERY
def test_the_selector_compares_each_kernel_with_what_is_exact(monkeypatch, name):
    *leaves, _ = (it.requires_grad_() for it in arguments(name, F32, (70, 24, 32, 16)))
    trials = []
    monkeypatch.setattr(
        block_choice.selector, "choose", lambda case, names, prepare, key: trials.append(prepare()) or "torch"
    )
    for activation in ("silu", "relu"):
        BLOCKS[name].ours(activation, *leaves)
    assert len(trials) == 2
    for trial in trials:
        for kernel in ("native", "reference"):
            with mpkernels.backend(kernel):
                for error in trial.errors(trial.run("dispatched")):
                    assert error.share < 16 * torch.finfo(F32).eps
        assert max(it.share for it in trial.errors([0.9 * it for it in trial.run("torch")])) > 0.05


x, up, down, bias = torch.ones(3, 4), torch.ones(6, 4), torch.ones(5, 6), torch.ones(6)
ERRORS = [
    (mlp, (x, up, bias, down, None, "swish"), ValueError,
     "mlp: activation must be one of none, relu, relu2, gelu, gelu_tanh, silu, sigmoid, tanh, got 'swish'"),
    (mlp, ([1.0], up, bias, down, None), TypeError, "mlp: x must be a tensor, got list"),
    (mlp, (x, up, bias, None, None), TypeError, "mlp: fc2_weight must be a tensor, got NoneType"),
    (mlp, (x[0, 0], up, bias, down, None), ValueError, "mlp: x must have at least one dimension, got a scalar"),
    (mlp, (x, down, None, up, None), ValueError, "mlp: fc1_weight must have shape (any, 4), got (5, 6)"),
    (mlp, (x, up, bias[:5], down, None), ValueError, "mlp: fc1_bias must have shape (6,), got (5,)"),
    (mlp, (x, up, bias, down.t(), None), ValueError, "mlp: fc2_weight must have shape (any, 6), got (6, 5)"),
    (mlp, (x, up, bias, down, bias), ValueError, "mlp: fc2_bias must have shape (5,), got (6,)"),
    (mlp, (x, up.half(), bias, down, None), TypeError, "mlp: fc1_weight must be torch.float32, got torch.float16"),
    (mlp, (x, up, bias, down, None, "gelu", 1.5), ValueError, "mlp: dropout must be between 0 and 1, got 1.5"),
    (mlp, (x, up.to("meta"), bias, down, None), ValueError, "mlp: fc1_weight must be on cpu, got meta"),
    (gated_linear, (x, up[:5]), ValueError, "gated_linear: gate_weight must have gate's rows and as many of up, got 5"),
    (gated_linear, (x, up, None, None, bias), ValueError,
     "gated_linear: up_bias must be None without up_weight: gate_bias holds both"),
    (gated_linear, (x, up, up[:3]), ValueError, "gated_linear: up_weight must have shape (6, 4), got (3, 4)"),
    (gated_linear, (x, up, up, bias, bias[:2]), ValueError, "gated_linear: up_bias must have shape (6,), got (2,)"),
    (gated_mlp, (x, up, up, down.t()), ValueError, "gated_mlp: down_weight must have shape (any, 6), got (6, 5)"),
    (gated_mlp, (x, up, None, down), ValueError, "gated_mlp: down_weight must have shape (any, 3), got (5, 6)"),
]  # fmt: skip


@pytest.mark.parametrize("kernel", ["native", "torch"])
@pytest.mark.parametrize(("function", "given", "kind", "text"), ERRORS, ids=[text for *_, text in ERRORS])
def test_errors_name_function_argument_wanted_and_got(function, given, kind, text, kernel):
    selector.pin(kernel)
    try:
        with pytest.raises(kind, match=f"^{re.escape(text)}$"):
            function(*given)
    finally:
        selector.pin(None)


class OfAUser(torch.Tensor):
    pass


def test_what_no_kernel_takes_is_torchs():
    got = mlp(x.as_subclass(OfAUser), up, bias, down, None)
    assert type(got) is OfAUser
    assert torch.equal(
        got.as_subclass(torch.Tensor), functional.linear(functional.gelu(functional.linear(x, up, bias)), down)
    )
