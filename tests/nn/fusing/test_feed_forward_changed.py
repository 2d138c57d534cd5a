"""Whatever happens to a part of timm's or diffusers' MLPs, before fuse or after: the fused model computes what the
plain one computes with the same change, to the bit, because the lines run as they were written."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.utils import parametrizations
from torch.testing import assert_close

from mpkernels.nn import fuse, unfuse
from tests.networks import one_thread
from tests.nn.fusing import as_diffusers
from tests.nn.fusing.feed_forwards import KINDS, FeedForward, TimmMlp, X, made, results
from tests.nn.fusing.models import recorded_ops

__all__ = ["one_thread"]  # a fixture that each test uses

OUTSIDE = ("", "net", "layers", "layers.0", "drop2", "6", "net.3")  # what the op doesn't stand for
PARTS = [(name, part) for name in KINDS for part, _ in made(name).named_modules() if part not in OUTSIDE]


class Adapted(nn.Module):
    """As an adapter does: the layer, and something beside it."""

    def __init__(self, base):
        super().__init__()
        torch.manual_seed(1)
        self.base, self.beside = base, nn.Linear(base.in_features, base.out_features)

    def forward(self, x):
        return self.base(x) + self.beside(x)


class Own(nn.Dropout):
    def forward(self, x):
        return super().forward(x) + 1


def put(change):
    """Put something else in the place of a part."""

    def replace(model, part):
        owner, _, name = part.rpartition(".")
        setattr(model.get_submodule(owner), name, change(model.get_submodule(part)))

    return replace


def on(change):
    return lambda model, part: change(model.get_submodule(part))


def doubled_forward(module):
    own = module.forward
    module.forward = lambda *arguments: 2 * own(*arguments)


ANY = {
    "forward hook": on(lambda it: it.register_forward_hook(lambda module, arguments, y: y * 2)),
    "forward pre-hook": on(lambda it: it.register_forward_pre_hook(lambda module, arguments: arguments[0] * 2)),
    "backward hook": on(lambda it: it.register_full_backward_hook(lambda module, dx, dy: (dx[0] * 2,))),
    "forward of the instance": on(doubled_forward),
    "another activation": put(lambda it: nn.Sequential(it, nn.ELU())),
}


def check(name, change, is_first, at_most=()):
    plain, fused = made(name), made(name)
    if is_first:
        fuse(fused)
    for model in (plain, fused):
        change(model)
    if not is_first:
        fuse(fused)
    with recorded_ops() as ran:
        got = results(fused)
    assert set(ran) <= set(at_most)
    want = results(plain)
    assert_close(got, want, rtol=1e-5 if ran else 0, atol=1e-5 if ran else 0)
    unfuse(fused)
    assert_close(results(fused), want, rtol=0, atol=0)


@pytest.mark.parametrize("is_first", [True, False], ids=["fused first", "fused last"])
@pytest.mark.parametrize("change", ANY)
@pytest.mark.parametrize(("name", "part"), PARTS, ids=str)
def test_a_changed_part(name, part, change, is_first):
    check(name, lambda model: ANY[change](model, part), is_first, () if is_first else ("linear_act", "gated_linear"))


LAYERS = {
    "adapter": put(Adapted),
    "weight_norm": on(parametrizations.weight_norm),
    "orthogonal": on(parametrizations.orthogonal),
    "hooked weight_norm": on(nn.utils.weight_norm),
    "subclass": put(lambda it: type("Own", (nn.Linear,), {"forward": lambda self, x: F.relu(F.linear(x, self.weight))})(
        it.in_features, it.out_features
    ).requires_grad_(False)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize("is_first", [True, False], ids=["fused first", "fused last"])
@pytest.mark.parametrize("change", LAYERS)
@pytest.mark.parametrize("name", KINDS)
def test_changed_layers(name, change, is_first):
    model = made(name)
    layers = [part for part, it in model.named_modules() if isinstance(it, nn.Linear)]
    for part in layers:

        def apply(model, part=part):
            torch.manual_seed(2)
            LAYERS[change](model, part)

        check(name, apply, is_first, () if is_first else ("linear_act", "gated_linear"))


@pytest.mark.parametrize(
    ("owner", "method"),
    [
        (nn.Identity, "forward"),
        (nn.Dropout, "forward"),
        (nn.Linear, "forward"),
        (F, "dropout"),
        (F, "linear"),
        (nn.ModuleList, "__iter__"),
        (as_diffusers.GELU, "forward"),
        (as_diffusers.GELU, "gelu"),
        (as_diffusers.GEGLU, "gelu"),
        (as_diffusers.SwiGLU, "forward"),
        (torch.Tensor, "chunk"),
        (FeedForward, "forward"),
    ],
    ids=lambda it: getattr(it, "__name__", it),
)
@pytest.mark.parametrize("is_first", [True, False], ids=["fused first", "fused last"])
def test_a_patched_class_or_function(monkeypatch, owner, method, is_first):
    plain, fused = ([made(name) for name in KINDS] for _ in range(2))
    for model in fused if is_first else ():
        fuse(model)
    own, calls = getattr(owner, method), []

    def patched(*arguments, **named):
        calls.append(method)
        return own(*arguments, **named)

    monkeypatch.setattr(owner, method, patched)
    for one, other in zip(plain, fused, strict=True):
        want, times = one(X), len(calls)
        calls.clear()
        fuse(nn.Identity() if is_first else other)
        assert_close(other(X), want, rtol=1e-5, atol=1e-6)
        assert len(calls) == times
        calls.clear()


def test_a_method_of_the_instance():
    model = FeedForward(as_diffusers.GELU)
    fuse(model)
    model.net[0].gelu = torch.relu
    want = model.net[2](torch.relu(model.net[0].proj(X)))
    with recorded_ops() as ran:
        assert torch.equal(model(X), want)
    assert ran == []


def test_an_identity_may_become_a_norm_and_a_norm_an_identity():
    model = TimmMlp()
    fuse(model)
    model.norm = nn.LayerNorm(16)
    want = model.fc2(model.norm(model.act(model.fc1(X))))
    with recorded_ops() as ran:
        assert torch.equal(model(X), want)
    assert ran == []
    model.norm = nn.Identity()
    with recorded_ops() as ran:
        model(X)
    assert ran == ["mlp"]
    assert [site.stood_there for site in fuse(TimmMlp(norm=nn.LayerNorm)).fused] == ["act(fc1(x))"]


@pytest.mark.parametrize("dropout", [nn.AlphaDropout, nn.Dropout1d, Own])
def test_another_dropout_is_called(dropout):
    model = TimmMlp()
    fuse(model)
    model.drop1 = dropout(0.0)
    want = model.fc2(model.drop1(model.act(model.fc1(X))))
    with recorded_ops() as ran:
        assert torch.equal(model(X), want)
    assert ran == []
