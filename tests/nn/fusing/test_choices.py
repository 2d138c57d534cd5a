"""A site that torch computes runs its plain lines after one look, until something makes another choice possible."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close

import mpkernels
from mpkernels import selector
from mpkernels.nn import fuse
from mpkernels.selector.timing import Timed
from tests.calls import calls_of
from tests.nn.fusing.choosing import Silu, asked, fused, in_a_row
from tests.nn.fusing.feed_forwards import made
from tests.nn.fusing.models import Gated, GatedApart, Mlp, Packed, X, recorded_ops
from tests.processes import alone, needs_gloo

__all__ = ["asked"]  # a fixture that each test of this file uses
MODELS = {
    "Mlp": Mlp,
    "Gated": Gated,
    "GatedApart": GatedApart,
    "Packed": Packed,
    "Sequential": in_a_row,
    "loop": partial(made, "a loop"),
}
LIVE = {"Mlp": Silu, "Sequential": partial(in_a_row, nn.SiLU)}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_site_that_no_line_fits_asks_once_and_costs_two_calls(asked, make):
    plain, model = make(), fused(make)
    del asked[:]
    other = torch.randn(7, 8)
    with recorded_ops() as ran:
        assert_close(model(other), plain(other), rtol=0, atol=0)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            model(other)
    assert ran == asked == []
    assert calls_of(partial(model, X)) <= calls_of(partial(plain, X)) + 2


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("make", LIVE.values(), ids=LIVE)
def test_a_site_that_some_line_fits_looks_its_calls_up(asked, make, autocast):
    plain, model = make(), make()
    fuse(model)
    few, many = X[0, :3], X.view(15, 8).repeat(2, 1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for x, is_ours in ((few, False), (many, not autocast)):
            for is_first in (True, False):
                with recorded_ops() as ran:
                    model(x)
                assert ran == ["mlp"] * is_ours
                assert bool(asked) == is_first
                del asked[:]
        assert calls_of(partial(model, few)) <= calls_of(partial(plain, few)) + (8, 12)[autocast]


OTHERS = {
    "rows": lambda model, x: model(x[:1]),
    "gradient": lambda model, x: model(x.clone().requires_grad_()),
    "no grad": torch.no_grad()(lambda model, x: model(x)),
    "autocast": torch.autocast("cpu", torch.bfloat16)(lambda model, x: model(x)),
    "frozen": lambda model, x: model.requires_grad_(False)(x),
    "dtype": lambda model, x: model.to(torch.bfloat16)(x.bfloat16()),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_a_call_that_differs_asks_anew(asked, other):
    model, x = fused(Silu), X[0, :3]
    model(x)
    del asked[:]
    model(x)
    assert asked == []
    other(model, x)
    assert len(asked) == 1


def set_anew(layer, name="weight"):
    setattr(layer, name, nn.Parameter(getattr(layer, name).detach().clone()))


def load_assigned(model):
    model.load_state_dict({name: it.clone() for name, it in model.state_dict().items()}, assign=True)


WAKINGS = {
    "forget": lambda model: selector.forget(),
    "pin": lambda model: selector.pin("native"),
    "pin and back": lambda model: (selector.pin("native"), selector.pin(None)),
    "assigned state": load_assigned,
    "new weight": lambda model: set_anew(first(model)),
    "new activation": lambda model: replace(model, nn.GELU, nn.GELU()),
    "new layer": lambda model: replace(model, nn.Linear, copy.deepcopy(first(model))),
    "fewer bits": lambda model: model.to(torch.bfloat16).to(torch.float32),
}
NEEDS_NO_WAKING = ("fewer bits",)  # the weights stay where they are, and no line fits another dtype


def first(model):
    return next(it for it in model.modules() if isinstance(it, nn.Linear))


def replace(model, kind, other):
    name = next(name for name, it in model.named_children() if isinstance(it, kind))
    setattr(model, name, other)


@pytest.mark.parametrize("change", WAKINGS)
@pytest.mark.parametrize("make", [Mlp, in_a_row])
def test_a_change_wakes_a_site(asked, make, change):
    model = fused(make)
    del asked[:]
    WAKINGS[change](model)
    with recorded_ops() as ran:
        model(X)
    assert bool(asked) == (change not in NEEDS_NO_WAKING)
    assert ran == ["mlp"] * (change == "pin")


@pytest.mark.parametrize("make", [Mlp, in_a_row])
def test_a_site_on_another_device_asks_anew(asked, make):
    model = fused(make)
    del asked[:]
    model.to("meta")(X.to("meta"))
    assert [case.device.type for case in asked] == ["meta"]


@pytest.mark.parametrize("make", [Mlp, in_a_row])
def test_a_backend_computes_a_quiet_site_until_it_ends(make):
    model = fused(make)
    for _ in range(2):
        with mpkernels.backend("reference"), recorded_ops() as ran:
            model(X)
        assert ran == ["mlp"]
        with recorded_ops() as ran:
            model(X)
        assert ran == []


def test_a_grown_layer_and_another_activation_may_become_ours():
    wide = fused(in_a_row)
    wide[0].weight, wide[0].bias = nn.Parameter(torch.randn(64, 8)), nn.Parameter(torch.randn(64))
    wide[2].weight = nn.Parameter(torch.randn(8, 64))
    other = fused(Mlp)
    other.act = nn.SiLU()
    for model in (wide, other):
        with recorded_ops() as ran:
            model(X.repeat(2, 1, 1))
        assert ran == ["mlp"]


def test_an_adapter_is_called_and_its_layer_may_come_back(asked):
    model, layer = fused(Mlp), nn.Linear(8, 16)
    inner, model.fc1 = model.fc1, layer
    del asked[:]
    assert_close(model(X), model.fc2(model.act(layer(X))), rtol=0, atol=0)
    assert asked
    model.fc1 = nn.Sequential(inner)
    model.fc1.register_forward_hook(lambda module, arguments, y: 2 * y)
    assert_close(model(X), model.fc2(model.act(2 * inner(X))), rtol=0, atol=0)


def test_tune_times_quiet_sites_and_what_it_finds_counts(monkeypatch):
    model = fused(Mlp)
    monkeypatch.setattr("mpkernels.selector.tune.time_ways", lambda *_: Timed({"native": 1, "torch": 2}, {}))
    [name] = mpkernels.tune(model, X).timed
    assert name.startswith("mlp gelu")
    with recorded_ops() as ran:
        model(X)
    assert ran == ["mlp"]


@needs_gloo
@pytest.mark.filterwarnings("ignore")  # FSDP2's own
@pytest.mark.parametrize("fused_first", [True, False])
@pytest.mark.parametrize("make", [Mlp, Silu])
def test_a_sharded_module_computes_the_same_and_can_be_pinned(make, fused_first):
    x = X.repeat(2, 1, 1)
    want = make()(x)
    with alone():
        model = fused(make, x) if fused_first else make()
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        fuse(model)
        for name, ops in ((None, ["mlp"] * (make is Silu)), ("native", ["mlp"])):
            selector.pin(name)
            for _ in range(2):
                with recorded_ops() as ran:
                    assert_close(model(x), want, rtol=1e-5, atol=1e-5)
                assert ran == ops
