"""Without tuning, the table decides what computes, in every process and situation, and no call times kernels."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from mpkernels import backend, selector
from mpkernels.functional import gated_linear, gated_mlp, linear_act, mlp
from mpkernels.ops import _extension
from mpkernels.ops.linear.block_kind import ROUNDING
from mpkernels.selector import table
from mpkernels.selector.case import Case
from tests import ROOT
from tests.linear.choosing import empty_selector

B16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
KERNELS = "native", "triton", ROUNDING, "torch"
CPU = Case("mlp", torch.device("cpu"), (768, 3072, 768), (F32,), "silu", True, "", 512, KERNELS)


@pytest.fixture(autouse=True)
def no_call_times(monkeypatch):
    """Empty the selector, and fail if a call times kernels."""

    def fail(*_):
        raise AssertionError("a call times kernels")

    monkeypatch.setattr("mpkernels.selector.tune.time_ways", fail)
    empty_selector(monkeypatch)


@pytest.fixture(params=[False, True], ids=["widened", "halves"])
def multiplies_halves(request, monkeypatch):
    monkeypatch.setattr(table, "multiplies_halves", lambda dtype: request.param)
    return request.param


@pytest.mark.parametrize("op", ["linear_act", "gated_linear", "mlp", "gated_mlp"])
@pytest.mark.parametrize("dtype", [B16, F16], ids=str)
@pytest.mark.parametrize("rows", [1, 512, None])
def test_sixteen_bits_are_widened_where_the_cpu_cannot_multiply_them(multiplies_halves, op, dtype, rows):
    name = table.kernel(CPU._replace(op=op, dtypes=(dtype, F32), rows=rows))
    assert (name == "native") == (not multiplies_halves)


def test_of_mlps_in_16_bits_only_those_of_fp32_weights_are_ours(monkeypatch):
    monkeypatch.setattr(table, "multiplies_halves", lambda dtype: True)
    x, up, down = torch.randn(2048, 8), torch.randn(16, 8, requires_grad=True), torch.randn(8, 16)
    with torch.autocast("cpu", B16):
        mlp(x, up, None, down, None, "gelu_tanh")
    mlp(x.to(B16), up.to(B16), None, down.to(B16), None, "gelu_tanh")
    assert [*selector.choices().values()] == [ROUNDING, "torch"]


def test_a_call_is_left_to_torch_if_no_line_fits_any_number_of_rows(multiplies_halves):
    alone = CPU._replace(op="linear_act", rows=1, trains=False)
    assert table.leaves_to_torch(alone)
    for other in (alone._replace(activation="gelu"), alone._replace(op="mlp")):
        assert not table.leaves_to_torch(other)
    assert table.leaves_to_torch(alone._replace(dtypes=(B16,))) == multiplies_halves
    on_cuda = alone._replace(device=torch.device("cuda"), dtypes=(B16,))
    assert table.leaves_to_torch(on_cuda)
    gelu = on_cuda._replace(activation="gelu")
    assert table.leaves_to_torch(gelu)
    assert not table.leaves_to_torch(gelu._replace(sizes=()))
    for width, is_torch in ((3072, True), (14336, False)):
        assert selector.is_never_ours("mlp", on_cuda.device, "gelu", width) == is_torch
        assert selector.is_never_ours("mlp", on_cuda.device, "silu", width)


@pytest.mark.parametrize("op", ["mlp", "gated_mlp"])
def test_a_wide_fp32_mlp_of_many_rows_that_trains_is_ours(op):
    case = CPU._replace(op=op)
    assert table.kernel(case) == "native"
    assert table.kernel(case._replace(rows=None)) == "native"  # a graph serves any number of rows
    narrow = case._replace(sizes=(256, 1024, 256))
    assert table.kernel(narrow._replace(activation="gelu_tanh")) == "native"
    for other in (case._replace(rows=1), case._replace(trains=False), narrow):
        assert table.kernel(other) == "torch"


def test_a_lone_gelu_is_ours_only_in_few_rows():
    case = CPU._replace(op="linear_act", activation="gelu")
    assert [table.kernel(case._replace(rows=rows)) for rows in (1, 64, 128, None)] == ["native"] * 2 + ["torch"] * 2


def test_a_missing_kernel_is_not_chosen():
    for dtypes in ((F32,), (B16, F32), (F16,)):
        assert table.kernel(CPU._replace(dtypes=dtypes, kernels=("torch",))) == "torch"


@pytest.mark.parametrize("dtypes", [(B16,), (B16, F32), (F16, F32)], ids=str)
def test_on_cuda_only_wide_layers_that_train_are_ours(dtypes):
    """Triton's fused products are chosen only by tuning."""
    kernels = "native", "triton", "torch"
    narrow = CPU._replace(op="gated_mlp", device=torch.device("cuda", 0), dtypes=dtypes, kernels=kernels)
    wide = narrow._replace(sizes=(4096, 14336, 4096))
    others = wide._replace(op="mlp", activation="gelu"), wide._replace(op="linear_act", activation="gelu")
    assert [table.kernel(it) for it in (wide, wide._replace(rows=1), *others)] == ["native"] * 4
    for it in (narrow, wide._replace(trains=False), *(it._replace(rows=64) for it in others)):
        assert table.kernel(it) == "torch"
    for it in (wide._replace(dtypes=(F32,)), wide._replace(kernels=("triton", "torch"))):
        assert table.kernel(it) == "torch"


HEAD = "device", "dtype", "functions", "activations", "calls", "input rows", "out_features", "computed by", "measured"


def range_in_words(first, last=math.inf):
    if (first, last) == (1, math.inf):
        return "any"
    return f"from {first}" if last == math.inf else f"{first} to {last}"


def cells(line):
    """Return a line of the table as the docs show it."""
    ops = "any" if len(line.ops) == 4 else ", ".join(line.ops)
    calls = ops, ", ".join(line.activations) or "any", "training" if line.trains else "any"
    sizes = range_in_words(*line.rows), range_in_words(line.least_hidden)
    numbers = f"{line.numbers}, weights in fp32" if line.kernel == ROUNDING else line.numbers
    return line.device, numbers, *calls, *sizes, line.kernel, line.measured


def test_the_docs_show_the_table():
    text = (ROOT / "docs" / "selector.md").read_text()
    lines = [f"| {' | '.join(it)} |" for it in (HEAD, *map(cells, table.TABLE))]
    shown = [it for it in text.splitlines() if it.startswith("| ") and it.count(" | ") == len(HEAD) - 1]
    assert [it for it in shown if "---" not in it] == lines


def test_each_line_names_an_existing_file_of_measurements():
    for line in table.TABLE:
        name = line.measured.partition(":")[0]
        assert (ROOT / "benchmarks" / "results" / name).is_file()


x, up, down, bias = torch.randn(512, 64), torch.randn(256, 64), torch.randn(64, 256), torch.randn(256)
CALLS = {
    "linear_act": lambda x=x: linear_act(x, up, bias, "silu"),
    "gated_linear": lambda x=x: gated_linear(x, up, up),
    "mlp": lambda x=x: mlp(x, up, bias, down, None),
    "gated_mlp": lambda x=x: gated_mlp(x, up, up, down),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_choice_is_the_same_in_every_situation(call):
    """Deterministic algorithms, compiled graphs, fake tensors and checkpoints change nothing."""
    call()
    [(_, want)] = selector.choices().items()

    def choice_within(run):
        selector.ask_again()
        run()
        return {*selector.choices().values()}

    torch.use_deterministic_algorithms(True)
    assert choice_within(call) == {want}
    torch.use_deterministic_algorithms(False)
    assert choice_within(torch.compile(call, backend="eager", fullgraph=True)) == {want}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert choice_within(lambda: call(mode.from_tensor(x))) == {want}
    leaf = x.clone().requires_grad_()
    trained = choice_within(lambda: call(leaf).sum().backward())
    assert choice_within(lambda: checkpoint(call, leaf, use_reentrant=False).sum().backward()) == trained


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_torch_computes_transforms_and_exported_graphs(call):
    torch.func.vmap(call)(x.view(2, 256, 64))
    assert selector.choices() == {}
    graph = torch.export.export(AsModule(call), (x,)).graph
    assert selector.choices() == {}
    called = {str(node.target) for node in graph.nodes if node.op == "call_function"}
    assert called
    assert all(name.startswith("aten.") for name in called)


class AsModule(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, x):
        return self.call(x)


def test_pin_forces_an_available_kernel():
    for name in ("native", "torch"):
        selector.pin(name)
        try:
            CALLS["mlp"]()
            assert {*selector.choices().values()} == {name}
        finally:
            selector.pin(None)
    selector.pin("triton")
    try:
        CALLS["linear_act"]()
        assert {*selector.choices().values()} == {"torch"}  # as the table says
    finally:
        selector.pin(None)
    with pytest.raises(ValueError, match="pin: name must be 'native', 'triton', 'torch' or None, got 'fastest'"):
        selector.pin("fastest")


@pytest.mark.parametrize("dtype", [F16, B16], ids=str)
def test_the_library_knows_which_dtypes_the_cpu_multiplies(dtype):
    """The C++ kernel decides by the same answer. Where it widens, z isn't rounded before it is squared."""
    x, weight = torch.ones(1, 2, dtype=dtype), torch.tensor([[1.0, 0.375 * torch.finfo(dtype).eps]], dtype=dtype)
    with backend("native"):
        y = linear_act(x, weight, None, "relu2")
    assert (y.item() == 1) == _extension.multiplies_halves(dtype)
