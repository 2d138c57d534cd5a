"""How many functions, Python's and C's, a call of a layer runs beyond torch's calls: on a busy machine times would tell
less. In a small layer each of them costs time."""

import pytest
import torch
from torch.nn.functional import linear, silu

from mpkernels import selector
from mpkernels.functional import gated_linear, gated_mlp, linear_act, mlp
from tests.calls import calls_of
from tests.linear.choosing import empty_selector

torch.manual_seed(0)
x, gate, up, out = (torch.randn(shape).requires_grad_() for shape in ((5, 8), (8, 8), (8, 8), (8, 8)))
bias, out_bias = (torch.randn(8).requires_grad_() for _ in range(2))
# ours, torch's, and the limits: by torch, with its forward alone; by our kernels, forward and backward, without and
# with autocast, under which fp32 weights are cast
CALLS = {
    "linear_act": (lambda: linear_act(x, gate, bias, "silu"), lambda: silu(linear(x, gate, bias)), 11, 41, 67),
    "mlp": (
        lambda: mlp(x, gate, bias, out, out_bias, "silu"),
        lambda: linear(silu(linear(x, gate, bias)), out, out_bias),
        13, 55, 97,
    ),
    "gated_linear": (lambda: gated_linear(x, gate, up), lambda: silu(linear(x, gate)) * linear(x, up), 12, 48, 74),
    "gated_mlp": (
        lambda: gated_mlp(x, gate, up, out),
        lambda: linear(silu(linear(x, gate)) * linear(x, up), out),
        13, 52, 86,
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _(monkeypatch):
    empty_selector(monkeypatch)


def beyond_torchs(ours, torchs, mixed):
    counts = []
    for call in (ours, torchs):
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            call()
            call()  # the second call knows what the first one has chosen
            counts.append(calls_of(call))
    return counts[0] - counts[1]


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_where_torch_computes_a_call_runs_a_few_functions_more_than_torchs(name, mixed):
    ours, torchs, few, *_ = CALLS[name]
    selector.pin("torch")
    assert beyond_torchs(ours, torchs, mixed) <= few + 3 * mixed


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_our_kernels_run_by_few_functions(name, mixed):
    ours, torchs, _, plain, cast = CALLS[name]
    selector.pin("native")
    trained = [lambda call=call: call().sum().backward() for call in (ours, torchs)]
    assert beyond_torchs(*trained, mixed) <= (cast if mixed else plain)
