"""Where torch computes a fused site in any number of rows, the plain lines run: the op takes the host more time."""

import copy

import pytest
import torch
from torch import nn

import mpkernels
from mpkernels import selector
from mpkernels.nn import fuse
from mpkernels.selector import table
from tests.hard_grads import same_bits
from tests.linear.choosing import forget_choices
from tests.nn.fusing.feed_forwards import results
from tests.nn.fusing.models import Function, GatedApart, Mlp, Packed, X, compiled, recorded_ops


class Row(nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


KINDS = Mlp, Function, GatedApart, Row


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
@pytest.mark.parametrize("kind", [Mlp, Function, GatedApart])
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


def test_halves_of_one_layer_are_as_wide_as_two_layers(monkeypatch):
    """Two layers of the joint layer's width are others: the table may give those to us."""
    monkeypatch.setattr(table, "leaves_to_torch", lambda case: case.sizes == (8, 16, 8))
    _, model = fused(Packed)
    assert ops_of(lambda: results(model)) == 0
    _, model = fused(GatedApart)
    assert ops_of(lambda: results(model)) == 0
    model.fc1, model.up, model.fc2 = nn.Linear(8, 32), nn.Linear(8, 32), nn.Linear(32, 8)
    assert [ops_of(lambda: results(model)) for _ in range(2)] == [1, 1]


def test_what_was_tuned_for_one_site_is_not_left_for_another(monkeypatch):
    """Sites with and without a bias have cases of their own, but one key."""
    _, model = fused(Mlp)
    monkeypatch.setattr(selector, "left_to_torch", set())
    monkeypatch.setattr(selector, "tuned", {"another case": "native"})
    assert [ops_of(lambda: results(model)) for _ in range(2)] == [1, 1]


def test_tune_asks_each_site():
    class Two(nn.Sequential):
        def __init__(self):
            super().__init__(Row(), Row())
            self[1][0], self[1][2] = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    model = fuse_in_place(Two())
    assert len(mpkernels.tune(model, X).timed) == 2


def test_pinned_to_torch_is_left_to_torch(monkeypatch):
    monkeypatch.setattr(table, "leaves_to_torch", lambda case: False)
    _, model = fused(Mlp)
    selector.pin("torch")
    assert [ops_of(lambda: results(model)) for _ in range(2)] == [1, 0]


def test_a_graph_outlives_what_is_left_later():
    _, model = fused(Mlp)
    graph, graphs = compiled(model)
    graph(X)
    fused(GatedApart)
    graph(X)
    assert len(graphs) == 1
