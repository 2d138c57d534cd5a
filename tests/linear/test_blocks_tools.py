"""Blocks under torch.compile, torch.func, torch.export, with the selector and the cast cache; bad input."""

import functools
import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import mpkernels
from mpkernels import selector
from mpkernels.functional import gated_linear, gated_mlp, linear_act, mlp
from mpkernels.linear import cast_cache, key_and_case
from mpkernels.ops.linear.block_kind import ROUNDING
from tests.block_cases import BLOCKS, MLPS, arguments, results
from tests.linear.test_blocks_autograd import saved_by
from tests.linear_cases import relative_error

B16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
EVERY = pytest.mark.parametrize("name", BLOCKS)
EVERY_LARGER_BLOCK = pytest.mark.parametrize("name", [name for name in BLOCKS if "linear_act" not in name])


@EVERY
def test_autocast_casts_each_parameter_once(monkeypatch, name):
    x, *parameters, _ = arguments(name, F32)
    parameters = [torch.nn.Parameter(it.t().contiguous() if it.dim() == 2 else it) for it in parameters]
    casts, cast = [], cast_cache.cast
    monkeypatch.setattr(cast_cache, "cast", lambda *which: casts.append(cast(*which)) or casts[-1])
    with mpkernels.backend("native"), torch.autocast("cpu", B16):
        for _ in range(2):
            BLOCKS[name].ours("silu", x, *(it.t() if it.dim() == 2 else it for it in parameters))
    assert len({it.data_ptr() for it in casts}) == len(parameters)


@pytest.mark.exhaustive
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


@pytest.mark.exhaustive
def test_inductor_writes_no_copy_around_an_mlp_and_fewer_kernels():
    """Its own kernels and products count, and the calls of our ops."""
    leaves = [it.requires_grad_() for it in arguments("mlp", B16, (128, 64, 256, 64))[:-1]]

    def calls_in(function):
        torch.compiler.reset()
        normed = lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:])  # noqa: E731
        compiled = torch.compile(lambda x, *others: x + function("gelu", normed(x), *others), fullgraph=True)
        _, written = run_and_get_code(lambda: compiled(*leaves).sum().backward())
        text = re.sub(r"#.*", "", "".join(code.partition("def call")[2] for code in written))
        return re.findall(r"cpp_fused\w*\(|extern_kernels\.\w+\(|torch\.ops\.[\w.]+\(|copy_|clone", text)

    selector.pin("native")
    try:
        ours, theirs = calls_in(BLOCKS["mlp"].ours), calls_in(BLOCKS["mlp"].torchs)
    finally:
        selector.pin(None)
        torch.compiler.reset()
    ops = [name for name in ours if not name.startswith("cpp_fused")]
    assert [name.removeprefix("torch.ops.mpkernels.").removesuffix(".default(") for name in ops] == [
        *("linear_act", "linear_act"),
        *("linear_dact", "linear_act_backward", "linear_act_backward"),
    ]
    assert len(ours) < len(theirs)


@EVERY
def test_compiles_where_tensors_are_given_twice(name):
    """All arguments of one shape are the same tensor, x too: so the gradient is the sum of all their gradients."""
    *given, dy = arguments(name, F32, (8, 8, 8, 8))
    leaves = list({it.shape: it for it in given}.values())

    def of_leaves(function, activation, *leaves):
        by_shape = {it.shape: it for it in leaves}
        return function(activation, *(by_shape[it.shape] for it in given))

    ours, torchs = (functools.partial(of_leaves, function) for function in BLOCKS[name][:2])
    selector.pin("native")
    try:
        compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(results(compiled, "gelu", leaves, dy), results(torchs, "gelu", leaves, dy))
    finally:
        selector.pin(None)
        torch.compiler.reset()


@EVERY
def test_functorch_and_export_give_torchs_results(name):
    x, *parameters, dy = arguments(name, F32)
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


TRANSFORMED = {
    "grad": lambda f, x, w: torch.func.grad(lambda x, w: f(x, w).sum(), (0, 1))(x, w),
    "grad of grad": lambda f, x, w: torch.func.grad(
        lambda w: torch.func.grad(lambda x: f(x, w).square().sum())(x).square().sum()
    )(w),
    "vmap": lambda f, x, w: torch.func.vmap(f, (0, None))(x, w),
    "vmap of grad": lambda f, x, w: torch.func.vmap(torch.func.grad(lambda w, x: f(x, w).sum()), (None, 0))(w, x),
    "grad of vmap": lambda f, x, w: torch.func.grad(lambda w: torch.func.vmap(lambda x: f(x, w))(x).sum())(w),
    "backward of vmap": lambda f, x, w: torch.autograd.grad(torch.func.vmap(lambda x: f(x, w))(x).sum(), w),
    "jvp": lambda f, x, w: torch.func.jvp(lambda x: f(x, w), (x,), (torch.ones_like(x),)),
    "vjp": lambda f, x, w: torch.func.vjp(f, x, w)[1](torch.ones(len(x), 7)),
    "jacrev": lambda f, x, w: torch.func.jacrev(f)(x, w),
    "jacfwd": lambda f, x, w: torch.func.jacfwd(f)(x, w),
    "hessian": lambda f, x, w: torch.func.hessian(lambda x: f(x, w).sum())(x),
}


@pytest.mark.parametrize("transformed", TRANSFORMED.values(), ids=TRANSFORMED)
@pytest.mark.parametrize("name", MLPS)
def test_a_block_that_recomputes_gives_torchs_results_under_transforms(name, transformed):
    """A checkpoint of torch's raises there."""
    x, weight, *parameters, _ = arguments(name, F32)
    ours, torchs = (
        transformed(lambda x, weight, f=f: f(x, weight, *parameters), x, weight.detach().requires_grad_())
        for f in (
            functools.partial(BLOCKS[name].ours, "silu", recompute=True),
            functools.partial(BLOCKS[name].torchs, "silu"),
        )
    )
    torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-5)


@EVERY_LARGER_BLOCK
def test_a_trial_runs_each_kernel_on_the_same_call(monkeypatch, name):
    *leaves, _ = (it.requires_grad_() for it in arguments(name, F32, (70, 24, 32, 16)))
    trials = []
    monkeypatch.setattr(key_and_case.selector, "choose", lambda case, prepare: trials.append(prepare()) or "torch")
    for activation in ("silu", "relu"):
        BLOCKS[name].ours(activation, *leaves)
    assert len(trials) == 2
    for trial in trials:
        want = trial.run("torch")
        assert len(want) == 1 + len(leaves)
        for kernel in ("native", "reference"):
            with mpkernels.backend(kernel):
                for mine, theirs in zip(trial.run("dispatched"), want, strict=True):
                    assert relative_error(mine, theirs) < 16 * torch.finfo(F32).eps


@pytest.mark.parametrize("dtype", [F16, B16], ids=str)
@EVERY_LARGER_BLOCK
def test_gradients_can_be_rounded_as_torch_rounds_them(monkeypatch, name, dtype):
    """Then gradients are as near to fp64 as torch's under autocast, and the block saves as little as in 16 bits."""
    monkeypatch.setattr(key_and_case.selector, "choose", lambda case, *_: case.kernels[case.kernels.index(ROUNDING)])
    *leaves, dy = arguments(name, F32, (65, 24, 33, 21))
    block = BLOCKS[name]
    with torch.autocast("cpu", dtype=dtype):
        saved, _ = saved_by(lambda: block.ours("silu", *(it.clone().requires_grad_() for it in leaves)))
        got, theirs = (results(f, "silu", leaves, dy.to(dtype)) for f in block[:2])
    exact = results(block.torchs, "silu", [it.to(dtype).double() for it in leaves], dy.to(dtype).double())
    for i, (mine, rival, want) in enumerate(zip(got, theirs, exact, strict=True)):
        assert mine.dtype == rival.dtype
        assert relative_error(mine, want) <= 1.02 * relative_error(rival, want) + torch.finfo(dtype).eps / 2
        if i > 1:
            assert torch.equal(mine, mine.to(dtype).float()) == (mine.dim() == 2)  # those of biases are sums in fp32
    casts = [it.numel() for it in leaves]
    hidden = sum(it.nbytes for it in saved.values() if it.numel() not in casts)
    assert hidden == block.bytes_saved * 65 * 33


def test_gradients_are_rounded_only_where_torch_rounds_them(monkeypatch):
    offered = []
    monkeypatch.setattr(key_and_case.selector, "choose", lambda case, *_: offered.append(case.kernels) or "torch")
    x, *parameters, _ = arguments("mlp", F32)
    in_halves = [it.bfloat16().requires_grad_() for it in parameters]
    for autocast, these in ((True, parameters), (True, in_halves), (False, parameters), (False, in_halves)):
        for it in these:
            it.requires_grad_()
        with torch.autocast("cpu", enabled=autocast):
            BLOCKS["mlp"].ours("silu", x if autocast else x.to(these[0].dtype), *these)
            with torch.no_grad():
                BLOCKS["mlp"].ours("silu", x.to(these[0].dtype), *these)
    assert offered == [("native", ROUNDING, "torch"), *[("native", "torch")] * 7]


def test_a_gradient_is_not_rounded_if_its_parameter_asks_for_fp32(monkeypatch):
    """The gradient of the fp32 weight beside it is rounded."""
    monkeypatch.setattr(key_and_case.selector, "choose", lambda case, *_: case.kernels[case.kernels.index(ROUNDING)])
    x, fc1, fc1_bias, fc2, fc2_bias, _ = arguments("mlp", F32, (65, 24, 33, 21))
    fc1 = fc1.bfloat16().requires_grad_()
    fc1.grad_dtype = F32
    for it in (fc1_bias, fc2, fc2_bias):
        it.requires_grad_()
    with torch.autocast("cpu"):
        BLOCKS["mlp"].ours("silu", x, fc1, fc1_bias, fc2, fc2_bias).float().square().sum().backward()
    assert not torch.equal(fc1.grad, fc1.grad.bfloat16().float())
    assert torch.equal(fc2.grad, fc2.grad.bfloat16().float())


x, up, down, bias = torch.ones(3, 4), torch.ones(6, 4), torch.ones(5, 6), torch.ones(6)
KNOWN = "one of none, relu, relu2, gelu, gelu_tanh, silu, sigmoid, tanh"
ERRORS = [
    (linear_act, (x, up, bias, "swish"), ValueError, f"linear_act: activation must be {KNOWN}, got 'swish'"),
    (linear_act, (x, up, bias, None), ValueError, f"linear_act: activation must be {KNOWN}, got None"),
    (linear_act, ([1.0], up), TypeError, "linear_act: x must be a tensor, got list"),
    (linear_act, (x, None), TypeError, "linear_act: weight must be a tensor, got NoneType"),
    (linear_act, (x, up, 0.5), TypeError, "linear_act: bias must be a tensor, got float"),
    (linear_act, (x[0, 0], up), ValueError, "linear_act: x must have at least one dimension, got a scalar"),
    (linear_act, (x, up[None]), ValueError,
     "linear_act: weight must have one or two dimensions, got shape (1, 6, 4)"),
    (linear_act, (x[:, :3], up), ValueError,
     "linear_act: x must have weight's 4 features in its last dimension, got shape (3, 3)"),
    (linear_act, (x, up, bias[:4]), ValueError, "linear_act: bias must have shape (6,), got (4,)"),
    (linear_act, (x, up, up), ValueError, "linear_act: bias must have shape (6,), got (6, 4)"),
    (linear_act, (x, up.bfloat16()), TypeError,
     "linear_act: x must be torch.bfloat16, as weight is, got torch.float32"),
    (linear_act, (x.double(), up), TypeError, "linear_act: x must be torch.float32, as weight is, got torch.float64"),
    (linear_act, (x, up, bias.half()), TypeError,
     "linear_act: bias must be torch.float32, as weight is, got torch.float16"),
    (linear_act, (x.int(), up), TypeError, "linear_act: x must be torch.float32, as weight is, got torch.int32"),
    (linear_act, (x, up.to("meta")), ValueError, "linear_act: x must be on meta, as weight is, got cpu"),
    (mlp, (x, up, bias, down, None, "swish"), ValueError, f"mlp: activation must be {KNOWN}, got 'swish'"),
    (mlp, ([1.0], up, bias, down, None), TypeError, "mlp: x must be a tensor, got list"),
    (mlp, (x, up, bias, None, None), TypeError, "mlp: fc2_weight must be a tensor, got NoneType"),
    (mlp, (x[0, 0], up, bias, down, None), ValueError, "mlp: x must have at least one dimension, got a scalar"),
    (mlp, (x, down, None, up, None), ValueError,
     "mlp: x must have fc1_weight's 6 features in its last dimension, got shape (3, 4)"),
    (mlp, (x, bias, None, up, None), ValueError, "mlp: fc1_weight must have two dimensions, got shape (6,)"),
    (mlp, (x, up, bias[:5], down, None), ValueError, "mlp: fc1_bias must have shape (6,), got (5,)"),
    (mlp, (x, up, bias, down.t(), None), ValueError, "mlp: fc2_weight must have shape (any, 6), got (6, 5)"),
    (mlp, (x, up, bias, down, bias), ValueError, "mlp: fc2_bias must have shape (5,), got (6,)"),
    (mlp, (x.half(), up, bias, down, None), TypeError,
     "mlp: x must be torch.float32, as fc1_weight is, got torch.float16"),
    (mlp, (x, up, bias, down.half(), None), TypeError,
     "mlp: fc2_weight must be torch.float32, as fc1_weight is, got torch.float16"),
    (mlp, (x, up, bias, down, None, "gelu", 1.5), ValueError, "mlp: dropout must be between 0 and 1, got 1.5"),
    (mlp, (x, up.to("meta"), bias, down, None), ValueError, "mlp: x must be on meta, as fc1_weight is, got cpu"),
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
    """The second time, the selector has a choice."""
    selector.pin(kernel)
    try:
        for _ in range(2):
            with pytest.raises(kind, match=f"^{re.escape(text)}$"):
                function(*given)
    finally:
        selector.pin(None)
