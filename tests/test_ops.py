"""What holds for every op, whatever it computes."""

import contextlib
import re
import subprocess
import sys

import pytest
import torch
from torch.utils._pytree import tree_leaves

import mpkernels
from mpkernels import ops
from mpkernels.ops import _registry
from tests.cases import random_grads
from tests.linear import layer


def tensors(device, requires_grad=False):
    grads = [grad.to(device).requires_grad_(requires_grad) for grad in random_grads(sizes=(5, 1025))]
    return grads, torch.zeros((), device=device), torch.full((), 0.5, device=device)


def optimizer_step(device, state_dtype=torch.float32):
    """Every way to keep a weight, in two groups. One has its lr and betas on the device, one has amsgrad."""
    make = {"device": device}
    params = [
        torch.linspace(-1, 1, size, **make).to(dtype)
        for size, dtype in ((5, torch.bfloat16), (1025, torch.float16), (33, torch.float32), (7, torch.bfloat16))
    ]
    masters = [torch.zeros(5, dtype=torch.int16, **make), torch.zeros(1025, dtype=torch.int16, **make)]
    masters += [torch.empty(0, **make), params[3].float()]
    states = [[torch.ones_like(it, dtype=state_dtype) for it in params] for _ in range(2)]
    largest = [torch.empty(0, **make), torch.empty(0, **make), *(it.clone() for it in states[0][2:])]
    scales = (
        [
            torch.ones((2 + bool(it.numel())) * -(-param.numel() // 256), **make)
            for it, param in zip(largest, params, strict=True)
        ]
        if state_dtype == torch.int8
        else []
    )
    steps = [torch.ones((), **make) for _ in params]
    lists = params, [it.clone() for it in params], *states, largest, masters, scales, steps
    hyper = [[value, value] for value in (1e-3, 0.9, 0.999, 0.01, 1e-8, False)]
    nothing = torch.empty(0, **make)
    on_device = [nothing] * 3 + [torch.full((), 1e-2, **make), nothing, torch.full((), 0.99, **make).double()]
    shared = torch.full((), 8.0, **make), torch.zeros((), **make), torch.ones((), dtype=torch.float64, **make)
    report = torch.zeros(5, 6, dtype=torch.float64, **make)
    return (*lists, [2, 2], *hyper, on_device, *shared, 1.0, torch.zeros(2, **make), torch.zeros((), **make), report)


def overflown(device):
    """After a step that was skipped."""
    grads, _, scale = tensors(device)
    grads[0][1], grads[1][2] = float("inf"), float("nan")
    report = torch.zeros(1 + len(grads), 6, dtype=torch.float64, device=device)
    return grads, torch.ones((), device=device), scale, False, report


def scale_state(device):
    """After an overflow, of which it takes two."""
    make = {"device": device}
    scale, found_inf = torch.full((), 3.0, **make), torch.ones((), **make)
    tracker, overflows = torch.full((), 5, dtype=torch.int32, **make), torch.ones(2, dtype=torch.int32, **make)
    return scale, tracker, found_inf, 2.0, 0.5, 2000, overflows, 1.0, 2.0**24, 2


def linear_layer(device):
    x, weight, bias, _ = layer(5, 7, 9, torch.bfloat16, device)
    return x, weight, bias, "gelu", True


def linear_layers_backward(device):
    x, weight, z, dy = layer(5, 7, 9, torch.bfloat16, device)
    return dy, x, weight, z.expand(5, 9), "gelu", torch.float32, torch.bfloat16


ARGUMENTS = {
    "adamw_": optimizer_step,
    "linear_act": linear_layer,
    "linear_act_backward": linear_layers_backward,
    "overflow_": overflown,
    "unscale_": tensors,
    "grad_stats": lambda device: tensors(device)[:1],
    "update_scale_": scale_state,
}
CALLS = [
    *ARGUMENTS.items(),
    ("adamw_", lambda device: optimizer_step(device, torch.int8)),
    ("linear_act", lambda device: (*linear_layer(device)[:2], None, "relu", True)),
    (
        "linear_act_backward",
        lambda device: (
            linear_layers_backward(device)[0],
            *[None] * 2,
            torch.empty(0, dtype=torch.bfloat16, device=device),
            "none",
            None,
            None,
        ),
    ),
]
PLAIN = ("unscale_", "grad_stats", "update_scale_")  # what users call takes the op's own arguments


def test_every_op_is_tested_here():
    assert ARGUMENTS.keys() == _registry._ops.keys()


@pytest.mark.parametrize(("name", "make"), CALLS)
def test_opcheck(target, name, make):
    torch.library.opcheck(_registry._ops[name].overload, make(target.device))


@pytest.mark.parametrize(("name", "make"), CALLS)
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


@pytest.mark.parametrize("name", ["unscale_", "grad_stats"])
def test_fake_tensors_of_any_size(name):
    """torch.compile's view: shapes and dtypes without memory, beyond 2^31 elements too."""
    with torch._subclasses.FakeTensorMode():
        grads = [torch.empty(2**31 + 9, dtype=torch.bfloat16), torch.empty(0), torch.empty(3, 2**31).t()]
        results = getattr(ops, name)(grads, *(torch.zeros(()), torch.ones(())) if name == "unscale_" else ())
        assert results is None or [x.shape for x in results] == [(3,), (3,), (), ()]


@pytest.mark.parametrize("call", [ops.unscale_, torch.ops.mpkernels.unscale_], ids=["function", "torch.ops"])
def test_autograd_notices_what_a_kernel_changed(target, call):
    """A kernel gets a bare pointer; unless the version is bumped, backward would use the changed tensor in silence."""
    (grad, *_), found_inf, inv_scale = tensors(target.device)
    weight = torch.ones_like(grad, requires_grad=True)
    loss = (weight * grad).sum()
    call([grad], found_inf, inv_scale)
    assert grad._version > 0
    assert found_inf._version > 0
    assert inv_scale._version == 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_results_carry_no_gradient(target):
    grads, *_ = tensors(target.device, requires_grad=True)
    assert not any(result.requires_grad for result in ops.grad_stats(grads))


@pytest.mark.parametrize("call", [ops.unscale_, torch.ops.mpkernels.unscale_], ids=["function", "torch.ops"])
def test_bad_input_changes_nothing(target, call):
    """Also where the good part of the list comes first."""
    good = torch.ones(3, device=target.device)
    found_inf, inv_scale = torch.zeros((), device=target.device), torch.full((), 0.5, device=target.device)
    for bad in (
        torch.ones(3, dtype=torch.int32),
        torch.ones(3).to_sparse(),
        torch.ones(1).expand(3),
        torch.ones(3, device="meta"),
    ):
        bad = bad if bad.is_meta else bad.to(target.device)
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            call([good, bad], found_inf, inv_scale)
        assert good.tolist() == [1.0] * 3
        assert found_inf.item() == 0.0


scalar, grad = torch.ones(()), torch.ones(3)
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
     "update_scale_: overflows must be two adjacent int32, got shape (2,), strides (2,)"),
    (ops.update_scale_, (scalar, count, scalar.to("meta"), 2.0, 0.5, 1, pair), ValueError,
     "update_scale_: found_inf must be on cpu, got meta"),
    (ops.overflow_, ([grad], scalar, None, False, torch.zeros(2, 6)), TypeError,
     "overflow_: report must be torch.float64, got torch.float32"),
    (ops.overflow_, ([grad], scalar, None, False, torch.zeros(1, 6).double()), ValueError,
     "overflow_: report must be contiguous, of shape (2, 6), got shape (1, 6), strides (6, 1)"),
    (ops.overflow_, ([grad], scalar, grad, False, torch.zeros(2, 6).double()), ValueError,
     "overflow_: scale must be a tensor of one element, got shape (3,)"),
    (ops.overflow_, ([grad.to("meta")], scalar, None, False, torch.zeros(2, 6).double()), ValueError,
     "overflow_: grads[0] must be on cpu, got meta"),
    (mpkernels.backends, ("unscale",), ValueError,
     "backends: op must be one of adamw_, grad_stats, linear_act, linear_act_backward, overflow_, unscale_, "
     "update_scale_, got 'unscale'"),
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
    """By what the profiler sees: the reference is made of torch's ops, a kernel isn't."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ops.grad_stats([grad])
    return "reference" if any(event.key == "aten::square" for event in profile.key_averages()) else "native"


def test_backends_nest_and_end():
    """The innermost counts; afterwards all is as it was, also after an exception."""
    assert kernel_that_runs() == "native"
    with mpkernels.backend("reference"):
        assert kernel_that_runs() == "reference"
        with contextlib.suppress(KeyError), mpkernels.backend("native"):
            assert kernel_that_runs() == "native"
            raise KeyError
        assert kernel_that_runs() == "reference"
    assert kernel_that_runs() == "native"


def test_backends_that_end_in_another_order_than_they_began():
    """As they may in two threads."""
    first, second = mpkernels.backend("reference"), mpkernels.backend("native")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert kernel_that_runs() == "native"
    second.__exit__(None, None, None)
    assert kernel_that_runs() == "native"


def test_a_backend_that_is_not_there_raises_instead_of_another():
    if torch.cuda.is_available():
        pytest.skip("needs a machine where Triton has no CUDA device and isn't interpreted")
    code = "import torch, mpkernels\nwith mpkernels.backend('triton'):\n    mpkernels.ops.grad_stats([torch.ones(3)])\n"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PATH": ""}, check=False)
    assert "NotImplementedError: grad_stats: no triton kernel on cpu, only native, reference" in run.stderr
