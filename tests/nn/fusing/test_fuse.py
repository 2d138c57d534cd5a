"""fuse and unfuse as users call them: containers of torch, the report, bad input."""

import copy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.testing import assert_close

from mpkernels.functional import linear_act
from mpkernels.nn import fuse, fusing, unfuse
from mpkernels.nn.fusing import classes
from tests.linear.choosing import forget_choices
from tests.nn.fusing.models import Chain, Mlp, Packed, X, assert_computes, compiled, recorded_ops

RELU = nn.ReLU()
SEQUENTIALS = {
    "lone activation": ([nn.Linear(8, 8), nn.GELU()], ["linear_act"]),
    "mlp": ([nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8)], ["mlp"]),
    "with dropout": ([nn.LayerNorm(8), nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.0), nn.Linear(16, 8)], ["mlp"]),
    "a row": (
        [nn.Linear(8, 9), nn.ReLU(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 8), nn.Softmax(-1)],
        ["linear_act", "mlp"],
    ),
    "one activation twice": ([nn.Linear(8, 8), RELU, nn.Linear(8, 8), RELU, nn.Linear(8, 8)], ["linear_act", "mlp"]),
    "dropout last": ([nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.0)], ["linear_act"]),
}


@pytest.mark.parametrize(("layers", "ops"), SEQUENTIALS.values(), ids=SEQUENTIALS)
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch.compile
def test_a_sequential_is_fused(layers, ops):
    model = nn.Sequential(*copy.deepcopy(layers))
    want = model(X)
    report = fuse(model)
    assert_computes(model, want, ops)
    assert len(report.fused) == len(ops)
    run, graphs = compiled(model)
    assert_close(run(X), want, rtol=1e-5, atol=1e-6)
    assert ("mpkernels." in "".join(graphs)) == bool(ops)
    torch.compiler.reset()
    unfuse(model)
    assert type(model) is nn.Sequential


def test_a_changed_sequential_runs_as_it_stands():
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    fuse(model)
    assert_close(model[:2](X), model[1](model[0](X)), rtol=1e-5, atol=1e-6)
    assert_close(model[1:](torch.randn(3, 16)).shape, torch.Size((3, 8)))
    model.insert(1, nn.LayerNorm(16))
    assert_close(model(X), model[3](model[2](model[1](model[0](X)))), rtol=0, atol=0)
    handle = model[2].register_forward_hook(lambda module, arguments, y: 2 * y)
    want = model[3](model[2](model[1](model[0](X))))
    assert_close(model(X), want, rtol=0, atol=0)
    handle.remove()


class Backwards(nn.Sequential):
    def forward(self, x):
        for module in reversed([*self]):
            x = module(x)
        return x


def test_a_sequential_with_another_forward_is_left():
    model = Backwards(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 16))
    want = model(X)
    assert fuse(model).fused == []
    assert_close(model(X), want, rtol=0, atol=0)


@pytest.mark.parametrize(
    "activation", ["relu", "gelu", F.silu, nn.GELU()], ids=["relu", "gelu", "silu function", "GELU module"]
)
@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_torchs_transformer_layers_are_fused(kind, activation):
    torch.manual_seed(0)
    layer = kind(8, 2, 16, dropout=0.0, activation=activation, batch_first=True)
    arguments = (X,) if kind is nn.TransformerEncoderLayer else (X, X)
    want = layer(*arguments)
    [site] = fuse(layer).fused
    assert site.stood_there == "linear2(dropout(activation(linear1(x))))"
    with recorded_ops() as ran:
        assert_close(layer(*arguments), want, rtol=1e-5, atol=1e-5)
    assert ran == ["mlp"]
    with torch.no_grad(), recorded_ops() as ran:
        assert_close(layer.eval()(*arguments), want, rtol=1e-5, atol=1e-5)
    if kind is nn.TransformerEncoderLayer and activation in ("relu", "gelu"):
        assert ran == []  # torch's fast path


@pytest.mark.filterwarnings("ignore:enable_nested_tensor", "ignore:The PyTorch API of nested tensors")
def test_a_fused_transformer_gives_the_same_result_in_inference():
    layer = nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    want = encoder(X)
    assert len(fuse(encoder).fused) == 2
    mask = torch.zeros(3, 5, dtype=torch.bool)
    for context in (torch.no_grad(), torch.enable_grad()):
        with context:
            assert_close(encoder(X, src_key_padding_mask=mask), want, rtol=1e-5, atol=1e-5)


def test_a_dry_run_changes_nothing_and_fusing_twice_is_fusing_once():
    model = nn.Sequential(Chain(), Packed())
    plain = [type(it) for it in model.modules()]
    dry = fuse(model, dry_run=True)
    assert [type(it) for it in model.modules()] == plain
    assert dry.saved_bytes(X).plain > 0
    assert [type(it) for it in model.modules()] == plain
    first = fuse(model)
    fused = [type(it) for it in model.modules()]
    second = fuse(model)
    assert [type(it) for it in model.modules()] == fused
    assert dry.fused == first.fused == second.fused
    assert first.left == second.left


def test_unfuse_takes_a_model_that_accelerate_has_unwrapped():
    """Accelerate leaves the model's forward in the model's attributes."""
    model = Mlp()
    fuse(model)
    model.forward = model.forward
    unfuse(model)
    assert_computes(model, Mlp()(X), [])


def test_unfuse_leaves_a_model_alone_that_was_never_fused():
    model = nn.Sequential(Chain())
    unfuse(model)
    assert [type(it) for it in model] == [Chain]


class Sealed(Mlp):
    """A module that refuses new attributes once it is made."""

    def __init__(self):
        super().__init__()
        object.__setattr__(self, "is_sealed", True)

    def __setattr__(self, name, value):
        if "is_sealed" in vars(self):
            raise RuntimeError(f"{name} can't be set")
        super().__setattr__(name, value)


def test_a_module_that_lets_nothing_be_set_is_fused_and_unfused():
    model = nn.Sequential(Mlp(), Sealed(), Mlp())
    want = model(X)
    assert [it.module for it in fuse(model).fused] == ["0", "1", "2"]
    assert_computes(model, want, 3 * ["mlp"])
    unfuse(model)
    assert [type(it) for it in model] == [Mlp, Sealed, Mlp]


class Masked(Mlp):
    """A module whose ``__class__`` names another class and can't be set."""

    @property
    def __class__(self):
        return Mlp


def test_a_module_that_takes_no_other_class_is_left_and_the_others_are_fused():
    model = nn.Sequential(Mlp(), Masked(), Mlp())
    report = fuse(model)
    assert [it.module for it in report.fused] == ["0", "2"]
    [left] = report.left
    assert left.module == "1"
    assert left.reason.startswith("takes no other class: ")
    assert type(model[1]) is Masked
    assert report.saved_bytes(X)


def test_if_fuse_is_interrupted_nothing_has_changed(monkeypatch):
    def become(module, kind):
        if module is model[1] and kind is not Mlp:
            raise KeyboardInterrupt
        classes.become(module, kind)

    model = nn.Sequential(Mlp(), Mlp(), Mlp())
    monkeypatch.setattr(fusing, "become", become)
    with pytest.raises(KeyboardInterrupt):
        fuse(model)
    assert [type(it) for it in model] == 3 * [Mlp]


@pytest.mark.parametrize("error", [TypeError, ValueError, RuntimeError, KeyError])
def test_a_class_that_allows_no_subclass_is_left_whatever_it_raises(error):
    class Final(Mlp):
        def __init_subclass__(cls):
            raise error("this class is final")

        def forward(self, x):
            return self.act(self.fc1(x))

    model = nn.Sequential(Final(), Mlp())
    report = fuse(model)
    assert [it.module for it in report.fused] == ["1"]
    [site] = report.left
    assert site.reason.startswith("its class allows no subclass: ")
    assert "this class is final" in site.reason
    assert type(model[0]) is Final


def test_other_calls_do_not_make_torch_compile_a_graph_again(monkeypatch):
    """Each call that isn't compiled adds a key to the selector. A graph must make no guard of these keys."""
    forget_choices(monkeypatch)
    model = Mlp()
    fuse(model)
    model(X)
    run, graphs = compiled(model)
    run(X)
    linear_act(torch.randn(3, 7), torch.randn(5, 7), None, "gelu")
    run(X)
    assert len(graphs) == 1
