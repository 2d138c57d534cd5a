"""A call's key and case choose what computes a layer: how often the selector is asked, and what that costs."""

import pytest
import torch
from torch.nn import Parameter, functional
from torch.utils._python_dispatch import TorchDispatchMode

import mpkernels
from mpkernels import selector
from mpkernels.functional import linear_act
from mpkernels.linear import compute_block
from mpkernels.nn import LinearAct
from mpkernels.selector import table
from tests.block_cases import BLOCKS, MLPS
from tests.hard_grads import same_bits
from tests.linear.choosing import CudaAutocast, computed_by, forget_choices
from tests.linear_cases import TORCH, torchs, transposed

B16, F16 = torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    """Return a list that gets each case which the selector is asked about. It answers "torch" to each."""
    asked, ask = [], selector.choose

    def choose(case, *rest):
        asked.append(case)
        return ask(case, *rest)

    forget_choices(monkeypatch)
    monkeypatch.setattr(selector, "choose", choose)
    return asked


def has_asked(asked):
    """Return whether the selector was asked since the last call."""
    count = len(asked)
    asked.clear()
    return count > 0


@pytest.mark.parametrize("best", ["torch", "native"])
def test_the_selector_is_asked_once_for_each_kind_of_call(asked, monkeypatch, best):
    computed_by(monkeypatch, best)
    layer, x = LinearAct(8, 6), torch.randn(5, 8)
    want = functional.gelu(functional.linear(x, layer.weight, layer.bias))
    for shape in ((5, 8), (5, 1, 8)):
        for first in (True, False):
            y = layer(x.view(shape))
            assert (type(y.grad_fn).__name__ == "GeluBackward0") == (best == "torch")
            torch.testing.assert_close(y.view(5, 6), want)
            assert has_asked(asked) == first


class ActivationsThatRan(TorchDispatchMode):
    """Keeps the name of each activation that torch runs."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        name = function.overloadpacket.__name__
        if name.removesuffix("_") in ("relu", "gelu", "silu", "sigmoid", "tanh", "pow", "square", "mul"):
            self.names.append(name)
        return function(*arguments, **options or {})


@pytest.mark.parametrize("activation", TORCH)
def test_torch_writes_over_z_where_no_backward_needs_it(activation):
    """This saves an allocation, and gives the same bits."""
    layer, x = LinearAct(8, 6, activation=activation), torch.randn(5, 8)
    want, before = torchs(x, layer.weight, layer.bias, activation), x.clone()
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        for _ in range(2):
            with mode(), ActivationsThatRan() as ran:
                y = layer(x)
            assert same_bits(y.detach(), want.detach())
            assert same_bits(x, before)
            assert len(ran.names) == {"none": 0, "relu2": 2}.get(activation, 1)
            if mode is torch.enable_grad:
                assert not any(name.endswith("_") for name in ran.names)
            else:
                assert all(name.endswith("_") for name in ran.names)
    frozen = layer.requires_grad_(False)  # a selective checkpoint may hold z
    with ActivationsThatRan() as ran:
        frozen(x)
    assert not any(name.endswith("_") for name in ran.names)


def test_functorch_gets_plain_torch_even_if_ours_is_chosen(monkeypatch):
    computed_by(monkeypatch, "native")
    layer, x = LinearAct(8, 6), torch.randn(5, 8)
    layer(x)
    monkeypatch.setattr(compute_block, "by_ours", None)
    torch.func.grad(lambda x: layer(x).sum())(x)


def test_the_selector_is_asked_again_if_anything_differs_that_a_choice_depends_on(asked):
    layer, x = LinearAct(8, 6), torch.randn(5, 8)

    others = {
        "rows": lambda: layer(x[:4]),
        "features": lambda: LinearAct(10, 6)(x.reshape(4, 10)),
        "outputs": lambda: LinearAct(8, 7)(x),
        "x's layout": lambda: layer(transposed(x)),
        "weight's layout": lambda: linear_act(x, transposed(layer.weight), layer.bias),
        "no bias": lambda: linear_act(x, layer.weight, None),
        "activation": lambda: linear_act(x, layer.weight, layer.bias, "silu"),
        "dtype": lambda: LinearAct(8, 6, dtype=B16)(x.to(B16)),
        "autocast": lambda: within(torch.autocast("cpu", B16), lambda: layer(x)),
        "weight's dtype": lambda: within(torch.autocast("cpu", B16), lambda: LinearAct(8, 6, dtype=B16)(x)),
        "x's dtype": lambda: within(torch.autocast("cpu", B16), lambda: layer(x.to(B16))),
        "autocast's dtype": lambda: within(torch.autocast("cpu", F16), lambda: layer(x)),
        "gradients": lambda: within(torch.no_grad(), lambda: layer(x)),
        "the other device's autocast": lambda: within(CudaAutocast(), lambda: layer(x[:3])),
        "both devices' autocast": lambda: within(torch.autocast("cpu", B16), lambda: layer(x[:3])),
    }
    layer(x)
    for name, call in others.items():
        has_asked(asked)
        call()
        assert has_asked(asked), name


@torch.autocast("cpu", B16)
@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_the_selector_is_asked_again_if_any_tensor_of_a_block_differs(asked, block):
    tensors = [torch.randn(shape) for shape in ((5, 8), *block.shapes(8, 6, 4))]
    block.ours("silu", *tensors)
    has_asked(asked)
    for i, it in enumerate(tensors):
        for other in (it.clone().requires_grad_(), it.to(B16), *([transposed(it)] if it.ndim == 2 else [])):
            block.ours("silu", *tensors[:i], other, *tensors[i + 1 :])
            assert has_asked(asked), ("x", *block.names)[i]


@pytest.mark.parametrize("block", MLPS.values(), ids=MLPS)
def test_the_selector_is_asked_again_if_a_block_has_another_number_of_outputs(asked, block):
    for outputs in (4, 5):
        block.ours("silu", *(torch.randn(shape) for shape in ((5, 8), *block.shapes(8, 6, outputs))))
        assert has_asked(asked)


def test_a_call_whose_x_is_frozen_is_another_case():
    """A frozen x needs one product less."""
    layer = LinearAct(8, 6)
    for x in (torch.randn(5, 8), torch.randn(5, 8, requires_grad=True)):
        layer(x)
    without, full = selector.choices()
    assert without.replace(", x frozen", "") == full != without


NOT_LEFT_TO_TORCH = {
    "another activation": lambda layer, x: linear_act(x, layer.weight, layer.bias, "silu"),
    "another dtype": lambda layer, x: LinearAct(8, 6, dtype=B16)(x.to(B16)),
    "autocast": lambda layer, x: within(torch.autocast("cpu", B16), lambda: layer(x)),
    "a parameter for x": lambda layer, x: layer(Parameter(x)),
    "a pinned kernel": lambda layer, x: selector.pin("native") or layer(x),
}


@pytest.mark.parametrize("other", NOT_LEFT_TO_TORCH.values(), ids=NOT_LEFT_TO_TORCH)
def test_a_call_that_no_line_of_the_table_fits_is_left_to_torch_in_every_size(asked, monkeypatch, other):
    monkeypatch.setattr(table, "leaves_to_torch", lambda case: case.activation == "gelu")
    layer, x = LinearAct(8, 6), torch.randn(5, 8)
    layer(x)
    has_asked(asked)
    monkeypatch.setattr("mpkernels.functional._compute_checked", lambda *_: asked.append("the whole path"))
    for call in (
        lambda: layer(x[:2]),
        lambda: linear_act(x, transposed(layer.weight), layer.bias),
        torch.no_grad()(lambda: layer(x)),
    ):
        assert call().shape[1] == 6
        assert not has_asked(asked)
    other(layer, x)
    assert asked == ["the whole path"]


def within(context, call):
    with context:
        return call()


CHANGES = {"forget": selector.forget, "pin": lambda: selector.pin("torch")}


@pytest.mark.parametrize("during_a_call", [True, False])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_selector_is_asked_again_after_forget_and_pin(asked, monkeypatch, change, during_a_call):
    """Another thread may make the change while the selector looks a call up."""
    monkeypatch.setattr(selector, "_pinned", None)
    monkeypatch.setattr(table, "kernel", lambda case: (during_a_call and change()) or "native")
    layer, x = LinearAct(8, 6), torch.randn(5, 8)
    layer(x)
    has_asked(asked)
    if not during_a_call:
        change()
    layer(x)
    assert has_asked(asked)


def test_backend_overrules_the_choice():
    layer, x = LinearAct(8, 6, dtype=B16), torch.randn(5, 8).to(B16)
    torchs = layer(x)
    with mpkernels.backend("reference"):
        ours = layer(x)
    assert type(torchs.grad_fn).__name__ == "GeluBackward0"
    assert type(ours.grad_fn).__name__ == "_BlockBackward"


@pytest.mark.parametrize("best", ["torch", "native"])
def test_errors_are_the_same_after_a_call_that_worked(monkeypatch, best):
    computed_by(monkeypatch, best)
    layer, x = LinearAct(8, 6), torch.randn(6, 8)
    layer(x)
    with pytest.raises(ValueError, match="linear_act: x must have weight's 8 features in its last dimension"):
        layer(x.reshape(8, 6))
    for shape in ((5,), (2, 6)):
        with pytest.raises(ValueError, match=r"linear_act: bias must have shape \(6,\), got \(" + str(shape[0])):
            linear_act(x, layer.weight, Parameter(torch.randn(shape)))
    with pytest.raises(TypeError, match="linear_act: bias must be a tensor, got int"):
        linear_act(x, layer.weight, 5)
    with pytest.raises(TypeError, match=r"linear_act: bias must be torch.float32, as weight is, got torch.float64"):
        linear_act(x, layer.weight, Parameter(layer.bias.double()))
    matrix = Parameter(torch.randn(6, 6))  # this is no error: torch computes it
    want = functional.gelu(functional.linear(x, layer.weight, matrix))
    torch.testing.assert_close(linear_act(x, layer.weight, matrix), want)


def test_rows_are_rounded_up_to_a_power_of_two(asked):
    """A few cases then stand for all sizes."""
    layer = LinearAct(8, 6)
    for rows in (1, 2, 3, 4, 5, 64, 65):
        layer(torch.randn(rows, 8))
    assert [case.rows for case in asked] == [1, 2, 4, 4, 8, 64, 128]


def test_the_selector_keeps_a_limited_number_of_calls(monkeypatch):
    monkeypatch.setattr(selector, "_MOST_CALLS", 3)
    layer = LinearAct(2, 3)
    for rows in range(1, 9):
        layer(torch.randn(rows, 2))
        assert len(selector.by_key) == (rows - 1) % 3 + 1


def test_torch_compile_makes_no_guard_of_a_choice():
    """If a graph depended on the choice, it would be compiled again when a choice is made."""
    layer, graphs = LinearAct(8, 6), []
    compiled = torch.compile(layer, backend=lambda graph, _: graphs.append(graph) or graph.forward, dynamic=False)
    x = torch.randn(5, 8)
    compiled(x)
    layer(x)
    compiled(x)
    assert len(graphs) == 1
