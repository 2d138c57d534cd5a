"""fuse fuses loops over a list of modules, which may begin with a projection of diffusers'. Where it can't, a loop runs
as it is written."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from mpkernels.nn import fuse
from mpkernels.nn.fusing import projections
from tests.nn.fusing import as_diffusers
from tests.nn.fusing.feed_forwards import FeedForward, Looped, X, made
from tests.nn.fusing.models import assert_computes, forms_of


def test_a_list_that_changes_after_fuse_runs_as_it_stands():
    model = Looped()
    fuse(model)
    for change in (
        lambda: model.layers.insert(2, nn.LayerNorm(16)),
        lambda: setattr(model, "layers", model.layers[:0]),
        lambda: setattr(model, "layers", nn.Sequential(nn.Tanh(), nn.Linear(8, 8))),
    ):
        change()
        want = 2 * X
        for layer in model.layers:
            want = layer(want)
        assert_computes(model, X + want, [])


class ReplacesTheLast(nn.Module):
    """Replaces the last layer of its list in each call, as a model may do that grows in training."""

    def forward(self, x):
        self.lists[0][-1] = self.another
        return x


def test_a_layer_may_replace_a_later_one_during_the_call():
    first = ReplacesTheLast()
    model = nn.Sequential(first, nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    first.lists, first.another = [model], nn.Linear(16, 8)
    fuse(model)
    assert_computes(model, nn.Sequential(model[1], model[2], first.another)(X), ["mlp"])


def test_two_loops_with_the_same_names_are_both_fused():
    class Twice(Looped):
        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            for layer in self.layers:
                x = layer(x)
            return x

    model = Twice()
    want = model(X)
    fuse(model)
    assert_computes(model, want, ["mlp"] * 2)


@pytest.mark.parametrize("approximate", ["tanh", "no such"])
def test_the_form_of_gelu_is_read_in_each_call(approximate):
    plain, fused = made("diffusers' GELU"), made("diffusers' GELU")
    fuse(fused)
    plain.net[0].approximate = fused.net[0].approximate = approximate
    if approximate == "tanh":
        assert_close(fused(X), plain(X), rtol=1e-5, atol=1e-6)
        return
    with pytest.raises(RuntimeError, match="approximate"):
        fused(X)


def test_a_method_that_was_patched_before_fuse_is_called(monkeypatch):
    kind = type("GELU", (as_diffusers.GELU,), {"__module__": as_diffusers.GELU.__module__})
    for name in ("forward", "gelu"):  # in a class that fuse hasn't met
        setattr(kind, name, vars(as_diffusers.GELU)[name])
    kind.gelu = lambda self, gate: torch.relu(gate)
    model = FeedForward(kind)
    want = model(X)
    fuse(model)
    assert_computes(model, want, [])


class OtherLoops:
    """Each method is a forward."""

    def reads_its_layer(self, x):
        for layer in self.layers:
            x = layer(x)
        return x + layer.weight.sum()

    def has_another_line(self, x):
        for layer in self.layers:
            x = layer(x)
            x = 2 * x
        return x

    def has_an_else(self, x):
        for layer in self.layers:
            x = layer(x)
        else:
            x = -x
        return x

    def read_after_an_error(self, x):
        try:
            for layer in self.layers:
                x = layer(x)
        finally:
            self.seen = x
        return x

    def read_by_a_function(self, x):
        self.now = lambda: x
        for layer in self.layers:
            x = layer(x)
        return x


class LoopsOverItsLayer(Looped):
    def __init__(self):
        super().__init__()
        self.layers.append(nn.Linear(8, 8))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        for other in [layer]:
            x = other(x)
        return x


@pytest.mark.parametrize("kind", [*forms_of(OtherLoops, Looped), LoopsOverItsLayer])
def test_a_loop_of_another_form_is_left_with_a_reason(kind):
    model = kind()
    want = model(X)
    report = fuse(model)
    assert report.fused == []
    assert [site.module for site in report.left] == [""]
    assert torch.equal(model(X), want)


def test_a_projection_that_was_fused_before_is_part_of_the_mlp():
    model = made("diffusers' SwiGLU")
    want = model(X)
    assert fuse(model.net[0]).fused
    fuse(model)
    assert_computes(model, want, ["gated_mlp"])
    model.net[1].register_forward_hook(lambda module, arguments, y: y)
    assert_computes(model, want, ["gated_linear"])


def test_a_patch_of_a_projection_that_was_fused_before_is_called(monkeypatch):
    model = made("diffusers' SwiGLU")
    fuse(model.net[0])
    fuse(model)
    monkeypatch.setattr(as_diffusers.SwiGLU, "forward", lambda self, x: self.activation(self.proj(x))[..., :16])
    want = model.net[2](model.net[0].activation(model.net[0].proj(X))[..., :16])
    assert_computes(model, want, [])


@pytest.mark.parametrize("names", [("GELU", "GEGLU"), ("SwiGLU", "LinearActivation")])
def test_a_projection_that_replaces_another_is_called(names):
    for first, second in (names, names[::-1]):
        model = FeedForward(getattr(as_diffusers, first))
        fuse(model)
        model.net[0] = getattr(as_diffusers, second)(8, 16)
        want = model.net[2](model.net[0](X))
        assert_computes(model, want, [])


@pytest.mark.parametrize("device", ["mps", "npu"])
def test_projections_are_called_on_devices_where_they_may_compute_otherwise(device):
    assert not projections.is_usual_on(SimpleNamespace(device=SimpleNamespace(type=device)))
    assert projections.is_usual_on(X)


def test_the_lines_before_the_loop_run():
    model = made("diffusers' GEGLU")
    fuse(model)
    with pytest.raises(TypeError, match="scale is gone"):
        model(X, scale=1.0)
