"""Tests that hold for every op, whatever it computes."""

import contextlib
import re

import pytest
import torch
from torch.utils._pytree import tree_leaves

import mpkernels
from mpkernels import ops
from mpkernels.doctor.samples import SAMPLES, grads, unscale
from mpkernels.ops import _devices, _registry
from mpkernels.ops.linear.linear_dact import _linear_dact
from mpkernels.ops.linear.linear_gated import _linear_dgated, _linear_gated

ARGUMENTS = {name: samples[0].arguments for name, samples in SAMPLES.items()}


def is_finite(make):
    return all(it.isfinite().all() for it in tree_leaves(make(torch.device("cpu"))) if isinstance(it, torch.Tensor))


# Samples that aren't finite are left out, except an op's first one: opcheck takes a NaN for a difference.
CALLS = [
    (name, it.arguments)
    for name, samples in SAMPLES.items()
    for it in samples
    if it is samples[0] or is_finite(it.arguments)
]
FIRST = {samples[0].arguments for samples in SAMPLES.values()}  # each op's first sample; the others reveal less
EACH_CALL = [pytest.param(*it, marks=() if it[1] in FIRST else pytest.mark.exhaustive) for it in CALLS]
PLAIN = ("unscale_", "grad_stats", "update_scale_")  # users call these ops with the op's own arguments


def test_every_op_is_tested_here():
    assert ARGUMENTS.keys() == _registry._ops.keys()


@pytest.mark.parametrize(("name", "make"), EACH_CALL)
def test_each_kernel_passes_opcheck(target, name, make):
    checks = "test_schema", "test_faketensor"
    torch.library.opcheck(_registry._ops[name].overload, make(target.device), test_utils=checks)


@pytest.mark.kernels("native")  # these checks don't look at what a kernel does
@pytest.mark.parametrize(("name", "make"), EACH_CALL)
def test_each_op_passes_opchecks_other_tests(target, name, make):
    checks = "test_autograd_registration", "test_aot_dispatch_dynamic"
    torch.library.opcheck(_registry._ops[name].overload, make(target.device), test_utils=checks)


@pytest.mark.kernels("native")
@pytest.mark.parametrize(("name", "make"), EACH_CALL)
def test_compiles_without_a_graph_break(target, name, make):
    function = getattr(ops, name) if name in PLAIN else _registry._ops[name]
    eager, compiled = make(target.device), make(target.device)
    want = function(*eager)
    got = torch.compile(function, fullgraph=True, backend="aot_eager")(*compiled)
    got, want = (
        [it for it in tree_leaves(each) if isinstance(it, torch.Tensor)] for each in ((compiled, got), (eager, want))
    )
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    torch.compiler.reset()


@pytest.mark.parametrize(("name", "make"), ARGUMENTS.items())
def test_the_default_device_changes_no_result(target, name, make):
    """After torch.set_default_device("cuda"), for example, launchers must still make tensors on the host."""
    arguments, same = make(target.device), make(target.device)
    want = _registry._ops[name](*same)
    with torch.device("meta"):
        got = _registry._ops[name](*arguments)
    got, want = ([x for x in tree_leaves(it) if torch.is_tensor(x)] for it in ((arguments, got), (same, want)))
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_triton_launches_on_the_tensors_device(monkeypatch):
    current = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext(current.append(device)))
    launch = _devices.on_their_device(lambda *arguments: len(arguments))
    with torch._subclasses.FakeTensorMode():
        there = torch.empty(2, device="cuda:1")
        assert launch([there, there], torch.empty(())) == 2
        assert launch(None, there) == 2
    assert launch([torch.empty(2)]) == launch([]) == 1
    assert current == [torch.device("cuda:1")] * 2


@pytest.mark.parametrize("name", ["unscale_", "grad_stats"])
def test_ops_take_fake_tensors_of_any_size(name):
    """torch.compile runs ops on fake tensors, which have shapes and dtypes but no memory, also beyond 2^31 elements."""
    with torch._subclasses.FakeTensorMode():
        tensors = [torch.empty(2**31 + 9, dtype=torch.bfloat16), torch.empty(0), torch.empty(3, 2**31).t()]
        results = getattr(ops, name)(tensors, *(torch.zeros(()), torch.ones(())) if name == "unscale_" else ())
        assert results is None or [x.shape for x in results] == [(3,), (3,), (), ()]


@pytest.mark.parametrize("call", [ops.unscale_, torch.ops.mpkernels.unscale_], ids=["function", "torch.ops"])
def test_autograd_notices_what_a_kernel_changed(target, call):
    """A kernel gets a bare pointer; unless the version is bumped, backward would use the changed tensor in silence."""
    (grad, *_), found_inf, inv_scale = unscale(target.device)
    weight = torch.ones_like(grad, requires_grad=True)
    loss = (weight * grad).sum()
    call([grad], found_inf, inv_scale)
    assert grad._version > 0
    assert found_inf._version > 0
    assert inv_scale._version == 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_results_carry_no_gradient(target):
    leaves = [grad.requires_grad_() for grad in grads(target.device)]
    assert not any(result.requires_grad for result in ops.grad_stats(leaves))


@pytest.mark.parametrize("call", [ops.unscale_, torch.ops.mpkernels.unscale_], ids=["function", "torch.ops"])
def test_bad_input_changes_nothing(target, call):
    """The good grad stays unchanged although it comes first in the list."""
    good = torch.ones(3, device=target.device)
    found_inf, inv_scale = torch.zeros((), device=target.device), torch.full((), 0.5, device=target.device)
    for bad in (
        good.int(),
        good.to_sparse(),
        good[:1].clone().expand(3),  # which on its way to a device would become dense
        good.to("meta"),
    ):
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            call([good, bad], found_inf, inv_scale)
        assert good.tolist() == [1.0] * 3
        assert found_inf.item() == 0.0


scalar, grad, many = torch.ones(()), torch.ones(3), torch.ones(3, 3)
count, pair = torch.ones((), dtype=torch.int32), torch.ones(2, dtype=torch.int32)
ERRORS = [
    (ops.unscale_, (grad, scalar, scalar), TypeError, "unscale_: grads must be a list of tensors, got Tensor"),
    (ops.unscale_, (7, scalar, scalar), TypeError, "unscale_: grads must be a list of tensors, got int"),
    (ops.unscale_, ([grad, None], scalar, scalar), TypeError, "unscale_: grads[1] must be a tensor, got NoneType"),
    (ops.unscale_, ([grad.int()], scalar, scalar), TypeError,
     "unscale_: grads[0] must be one of fp16, bf16, fp32, fp64, got torch.int32"),
    (ops.unscale_, ([grad.to(torch.complex64)], scalar, scalar), TypeError,
     "unscale_: grads[0] must be one of fp16, bf16, fp32, fp64, got torch.complex64"),
    (ops.unscale_, ([grad.to_sparse()], scalar, scalar), TypeError,
     "unscale_: grads[0] must be dense, got layout torch.sparse_coo"),
    (ops.unscale_, ([torch.ones(1).expand(3)], scalar, scalar), ValueError,
     "unscale_: grads[0] must not share memory between its elements, got strides (0,)"),
    (ops.unscale_, ([grad, grad.to("meta")], scalar, scalar), ValueError,
     "unscale_: grads[1] must be on cpu, got meta"),
    (ops.unscale_, ([grad], scalar.double(), scalar), TypeError,
     "unscale_: found_inf must be torch.float32, got torch.float64"),
    (ops.unscale_, ([grad], scalar, torch.ones(2)), ValueError,
     "unscale_: inv_scale must be a tensor of one element, got shape (2,)"),
    (ops.unscale_, ([grad], scalar, 0.5), TypeError, "unscale_: inv_scale must be a tensor, got float"),
    (ops.grad_stats, ([],), ValueError, "grad_stats: grads must hold at least one tensor, got an empty list"),
    (ops.grad_stats, (grad,), TypeError, "grad_stats: grads must be a list of tensors, got Tensor"),
    (ops.grad_stats, ([grad, grad.long()],), TypeError,
     "grad_stats: grads[1] must be one of fp16, bf16, fp32, fp64, got torch.int64"),
    (ops.grad_stats, ([grad, grad.to("meta")],), ValueError, "grad_stats: grads[1] must be on cpu, got meta"),
    (ops.update_scale_, (scalar, scalar, scalar, 2.0, 0.5, 1, pair), TypeError,
     "update_scale_: growth_tracker must be torch.int32, got torch.float32"),
    (ops.update_scale_, (scalar, count, grad, 2.0, 0.5, 1, pair), ValueError,
     "update_scale_: found_inf must be a tensor of one element, got shape (3,)"),
    (ops.update_scale_, (scalar, count, scalar, 2.0, 0.5, 1, torch.ones(4, dtype=torch.int32)[::2]), ValueError,
     "update_scale_: overflows must be contiguous, of shape (2,), got shape (2,), strides (2,)"),
    (ops.update_scale_, (scalar, count, scalar, 2.0, 0.5, 1, torch.ones(1, dtype=torch.int32)), ValueError,
     "update_scale_: overflows must be contiguous, of shape (2,), got shape (1,), strides (1,)"),
    (ops.update_scale_, (scalar, count, scalar.to("meta"), 2.0, 0.5, 1, pair), ValueError,
     "update_scale_: found_inf must be on cpu, got meta"),
    (ops.overflow_, ([grad], scalar, None, False, torch.zeros(2, 6)), TypeError,
     "overflow_: report must be torch.float64, got torch.float32"),
    (ops.overflow_, ([grad], scalar, None, False, torch.zeros(1, 6).double()), ValueError,
     "overflow_: report must be contiguous, of shape (2, 6), got shape (1, 6), strides (6, 1)"),
    (ops.overflow_, ([grad], scalar, None, False, torch.zeros(6, 2).double().T), ValueError,
     "overflow_: report must be contiguous, of shape (2, 6), got shape (2, 6), strides (1, 2)"),
    (ops.overflow_, ([grad], scalar, grad, False, torch.zeros(2, 6).double()), ValueError,
     "overflow_: scale must be a tensor of one element, got shape (3,)"),
    (ops.overflow_, ([grad.to("meta")], scalar, None, False, torch.zeros(2, 6).double()), ValueError,
     "overflow_: grads[0] must be on cpu, got meta"),
    (ops.linear_dact, (grad, many, many, "gelu", None), ValueError,
     "linear_dact: dy must have shape (any, any), got (3,)"),
    (ops.linear_dact, ([1.0], many, many, "gelu", None), TypeError, "linear_dact: dy must be a tensor, got list"),
    (ops.linear_dact, (many.int(), many, many, "gelu", None), TypeError,
     "linear_dact: dy must be one of fp16, bf16, fp32, fp64, got torch.int32"),
    (ops.linear_dact, (many, many[:2], many, "gelu", None), ValueError,
     "linear_dact: weight must have shape (3, any), got (2, 3)"),
    (ops.linear_dact, (many, many.half(), many, "gelu", None), TypeError,
     "linear_dact: weight must be torch.float32, got torch.float16"),
    (ops.linear_dact, (many, many, many.to("meta"), "gelu", None), ValueError,
     "linear_dact: saved must be on cpu, got meta"),
    (ops.linear_dact, (many, many, many[:, :2], "gelu", None), ValueError,
     "linear_dact: saved must have shape (3, 3), got (3, 2)"),
    (ops.linear_dact, (many, many, many, "swish", None), ValueError,
     "linear_dact: activation must be one of none, relu, relu2, gelu, gelu_tanh, silu, sigmoid, tanh, got 'swish'"),
    (ops.linear_dact, (many, many, many, "gelu", torch.float16), TypeError,
     "linear_dact: bias_dtype must be torch.float32, got torch.float16"),
    (_linear_dact, (many, many, many[:, :2], "gelu", None, True), ValueError,
     "linear_dact: saved must have shape (3, 3), got (3, 2)"),
    (_linear_gated, (grad, many, many, None, None, "silu", True), ValueError,
     "linear_gated: x must have shape (any, any), got (3,)"),
    (_linear_gated, (many, many, many[:2], None, None, "silu", True), ValueError,
     "linear_gated: up_weight must have shape (3, 3), got (2, 3)"),
    (_linear_gated, (many, many, many, grad[:2], None, "silu", True), ValueError,
     "linear_gated: gate_bias must have shape (3), got (2,)"),
    (_linear_gated, (many, many, many, None, grad.half(), "silu", True), TypeError,
     "linear_gated: up_bias must be torch.float32, got torch.float16"),
    (_linear_gated, (many, many, many, None, None, "swish", True), ValueError,
     "linear_gated: activation must be one of none, relu, relu2, gelu, gelu_tanh, silu, sigmoid, tanh, got 'swish'"),
    (_linear_dgated, (many, None, many, "silu", True), ValueError,
     "linear_dgated: z must have gate's columns and as many of up, got shape (3, 3)"),
    (_linear_dgated, (many, None, torch.ones(3, 4), "silu", True), ValueError,
     "linear_dgated: dy must have shape (3, 2), got (3, 3)"),
    (_linear_dgated, (many, many, torch.ones(3, 4), "silu", True), ValueError,
     "linear_dgated: weight must have shape (3, 2), got (3, 3)"),
    (mpkernels.backends, ("unscale",), ValueError,
     "backends: op must be one of adam_, adamw_, grad_stats, linear_act, linear_act_backward, linear_dact, "
     "linear_dgated, linear_gated, lion_, overflow_, sgd_, unscale_, update_scale_, got 'unscale'"),
    (mpkernels.backend("fastest").__enter__, (), ValueError,
     "backend: name must be one of native, triton, reference, got 'fastest'"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "arguments", "kind", "text"), ERRORS, ids=[text for *_, text in ERRORS])
def test_errors_name_op_argument_wanted_and_got(function, arguments, kind, text):
    with pytest.raises(kind, match=f"^{re.escape(text)}$"):
        function(*arguments)


@pytest.mark.parametrize("kernel", ["reference", "native", "triton"])
def test_every_kernel_gives_the_same_error(kernel):
    with mpkernels.backend(kernel), pytest.raises(TypeError, match="grads\\[0\\] must be one of fp16"):
        ops.unscale_([grad.int()], scalar, scalar)


def kernel_that_runs():
    """Return the kernel that runs, by the profiler: the reference consists of torch's ops, a kernel doesn't."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        ops.grad_stats([grad])
    return "reference" if any(event.key == "aten::square" for event in profile.key_averages()) else "native"


def test_backends_nest_and_end():
    """The innermost backend counts. When it ends, even by an exception, the outer one counts again."""
    assert kernel_that_runs() == "native"
    with mpkernels.backend("reference"):
        assert kernel_that_runs() == "reference"
        with contextlib.suppress(KeyError), mpkernels.backend("native"):
            assert kernel_that_runs() == "native"
            raise KeyError
        with mpkernels.backend("reference"):
            pass
        assert kernel_that_runs() == "reference"
    assert kernel_that_runs() == "native"


@pytest.mark.parametrize(("outer", "inner"), [("native", "reference"), ("reference", "native")])
def test_the_inner_backend_decides_whether_a_step_goes_straight_to_c_plus_plus(outer, inner):
    with mpkernels.backend(outer), mpkernels.backend(inner):
        goes_straight = ops.adamw_.by_plan.on(torch.device("cpu")) is not None
    assert goes_straight == (inner == "native")


def test_backends_may_end_in_another_order_than_they_began():
    """Contexts in two threads may end in any order."""
    first, second = mpkernels.backend("reference"), mpkernels.backend("native")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert kernel_that_runs() == "native"
    second.__exit__(None, None, None)
    assert kernel_that_runs() == "native"
