"""fuse looks at a model without running any of its code."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.testing import assert_close

from mpkernels.nn import fuse
from tests.nn.fusing.models import Mlp, X, assert_computes


class Ran(Exception):  # noqa: N818
    """Code of the user's ran."""


class HasProperties(Mlp):
    @property
    def weight(self):
        raise Ran

    @property
    def own_act(self):
        raise Ran

    @property
    def rate_now(self):
        raise Ran

    def forward(self, x):
        x = x + self.fc2(self.own_act(self.fc1(x)))
        h = self.act(self.fc1(x))
        h = F.dropout(h, self.rate_now, self.training)
        return self.rate_now * self.fc2(h)


class Lazy:
    """A proxy of an object that isn't loaded yet."""

    @property
    def __class__(self):
        raise Ran

    def __getattr__(self, name):
        raise Ran


class HoldsAProxy(Mlp):
    def __init__(self):
        super().__init__()
        vars(self)["lazy"] = Lazy()  # nn.Module's __setattr__ would ask for its class

    def forward(self, x):
        for layer in self.lazy:
            x = layer(x)
        return self.lazy.act(self.fc1(x)) + self.lazy.fc2(F.gelu(self.up(x)))


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.times = 0

    def forward(self, weight):
        self.times += 1
        return 2 * weight


class SeesEveryFunction(torch.Tensor):
    is_made = False

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        if cls.is_made:
            raise Ran
        return super().__torch_function__(function, types, arguments, options)


def has_parameters_of_a_subclass():
    model = Mlp()
    model.fc1.weight = nn.Parameter(model.fc1.weight.detach().as_subclass(SeesEveryFunction))
    model.scales = nn.Parameter(torch.ones(2, 2).as_subclass(SeesEveryFunction))
    return model


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize("kind", [HasProperties, HoldsAProxy, has_parameters_of_a_subclass], ids=lambda it: it.__name__)
def test_no_code_of_the_users_runs(kind, dry_run, monkeypatch):
    model = nn.Sequential(kind())
    monkeypatch.setattr(SeesEveryFunction, "is_made", True)
    report = fuse(model, dry_run)
    assert not {"mlp, gelu", "gated_mlp, gelu"} & {site.computed_by for site in report.fused}


@pytest.mark.parametrize("dry_run", [True, False])
def test_no_parametrization_runs(dry_run):
    model = nn.Sequential(Mlp(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).train()
    for layer in (model[0].fc1, model[0].norm, model[1]):
        parametrize.register_parametrization(layer, "weight", Counts())
    for layer in (model[0].fc2, model[3]):
        parametrizations.spectral_norm(layer)
    before = {name: it.clone() for name, it in model.state_dict().items()}
    counters = [it for it in model.modules() if isinstance(it, Counts)]
    times = [it.times for it in counters]
    report = fuse(model, dry_run)
    assert [it.times for it in counters] == times
    assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert "fc1 is no plain torch.nn.Linear" in {site.reason for site in report.left}


class RecordsGetattr(Mlp):
    def __init__(self):
        super().__init__()
        self.asked = []

    def __getattr__(self, name):
        if name != "asked":
            self.asked.append(name)
        return super().__getattr__(name)


class RecordsGetattribute(Mlp):
    asked = ()

    def __getattribute__(self, name):
        if name != "asked" and not name.startswith("__"):
            RecordsGetattribute.asked += (name,)
        return super().__getattribute__(name)


@pytest.mark.parametrize("kind", [RecordsGetattr, RecordsGetattribute])
def test_attributes_that_need_code_are_read_only_by_the_forward(kind):
    plain, fused = kind(), kind()
    before = [it for it in fused.asked if "fc" in it or it == "act"]
    [site] = fuse(fused).left
    assert [it for it in fused.asked if "fc" in it or it == "act"] == before
    assert site.reason == "its forward reads attributes by code of its class's own"
    assert_computes(fused, plain(X), [])


class StaticActivation(Mlp):
    gelu, scale = staticmethod(F.gelu), 2.0

    def forward(self, x):
        h = self.gelu(self.fc1(x))
        return self.scale * x + self.fc2(h)


def test_attributes_of_a_class_are_found():
    plain, fused = StaticActivation(), StaticActivation()
    fuse(fused)
    assert_computes(fused, plain(X), ["mlp"])
