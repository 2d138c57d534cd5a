"""Where torch computes a fused site in any number of rows, the plain lines run: the op takes the host more time."""

import copy

import pytest
import torch
from torch import nn
from transformers.activations import GELUActivation, GELUTanh, NewGELUActivation, SiLUActivation

import mpkernels
from mpkernels import selector
from mpkernels.nn import fuse
from mpkernels.selector import table
from tests.hard_grads import same_bits
from tests.linear.choosing import forget_choices
from tests.nn.fusing.feed_forwards import results
from tests.nn.fusing.models import Function, GatedApart, Mlp, Packed, X, recorded_ops

KINDS = Mlp, Function, GatedApart


@pytest.fixture(autouse=True)
def _torch_computes_all(monkeypatch):
    forget_choices(monkeypatch)
    monkeypatch.setattr(table, "leaves_to_torch", lambda case: True)


def fused(kind):
    plain = kind()
    model = fuse_in_place(copy.deepcopy(plain))
    results(model)  # the selector's first look at these calls
    return plain, model


def fuse_in_place(model):
    assert fuse(model).fused
    return model


def ops_of(run):
    with recorded_ops() as ran:
        run()
    return len(ran)


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_first_call_runs_the_op(kind):
    plain, model = fused(kind)
    with recorded_ops() as ran:
        got = results(model)
    assert not ran
    assert all(map(same_bits, got, results(plain)))


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_has_choices_of_its_own(kind):
    _, model = fused(kind)
    with torch.autocast("cpu", torch.bfloat16):
        assert ops_of(lambda: model(X)) == 1
        assert ops_of(lambda: model(X)) == 0
    assert ops_of(lambda: results(model)) == 0


OTHERS = {
    "another dtype": lambda model: model.double()(X.double()),
    "without autograd": torch.no_grad()(lambda model: model(X)),
    "a kernel by name": mpkernels.backend("reference")(lambda model: model(X)),
    "what is pinned": lambda model: selector.pin("native") or model(X),
    "wider layers": lambda model: wider(model)(X),
}


def wider(model):
    model.fc1, model.up, model.fc2 = nn.Linear(8, 24), nn.Linear(8, 24), nn.Linear(24, 8)
    return model


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("kind", KINDS)
def test_others_still_run_the_op(kind, other):
    _, model = fused(kind)
    assert ops_of(lambda: other(model)) == 1


def test_what_was_tuned_is_asked_again():
    _, model = fused(Mlp)
    mpkernels.tune(model, X)
    assert ops_of(lambda: results(model)) == 1


def test_a_line_of_the_table_keeps_the_op(monkeypatch):
    monkeypatch.setattr(table, "leaves_to_torch", lambda case: case.sizes != (8, 16, 8))
    _, model = fused(Mlp)
    assert ops_of(lambda: results(model)) == 1


def test_halves_of_one_layer_are_known_by_that_layer(monkeypatch):
    seen = []
    monkeypatch.setattr(table, "leaves_to_torch", lambda case: seen.append(case.sizes) or True)
    _, model = fused(Packed)
    assert seen == [(8, 16, 8)]
    assert ops_of(lambda: results(model)) == 0


@pytest.mark.parametrize(
    ("activation", "is_one_op"),
    [
        (nn.GELU("tanh"), True),
        (SiLUActivation(), True),
        (GELUActivation(), True),
        (GELUTanh(), True),
        (GELUActivation(use_gelu_python=True), False),
        (GELUTanh(use_gelu_tanh_python=True), False),
        (NewGELUActivation(), False),
    ],
    ids=str,
)
def test_an_activation_of_several_ops_stays_fused(activation, is_one_op):
    """torch computes these by one op inside of ours, which takes a GPU less time and memory than the plain lines."""

    class WithActivation(Mlp):
        def __init__(self):
            super().__init__()
            self.act = activation

        def forward(self, x):
            return self.fc2(self.act(self.fc1(x)))

    _, model = fused(WithActivation)
    assert ops_of(lambda: results(model)) == (not is_one_op)
