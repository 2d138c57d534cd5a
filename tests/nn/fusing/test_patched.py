"""A fused model calls replacements of torch's classes and functions as a plain one does, whether they were patched
before fuse or after."""

from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close

from mpkernels.nn import fuse
from tests.nn.fusing import as_diffusers
from tests.nn.fusing.feed_forwards import FeedForward, made
from tests.nn.fusing.models import (
    Function,
    Gated,
    GatedBySquares,
    InMethod,
    Keywords,
    Mlp,
    Packed,
    PackedByTorch,
    Squared,
    SquaredByAnOperator,
    X,
    forms_of,
    recorded_ops,
)


class Forwards:
    def with_dropout(self, x):
        return self.fc2(F.dropout(self.act(self.fc1(self.norm(x))), 0.0, self.training))

    def relu(self, x):
        return F.relu(self.fc1(x))

    def tanh(self, x):
        return F.tanh(self.fc1(x))


WITH_DROPOUT, RELU, TANH = forms_of(Forwards)


def sequential():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.0), nn.Linear(16, 8))


PATCHES = [
    (Mlp, nn.Linear, "forward"),
    (Mlp, nn.GELU, "forward"),
    (Mlp, nn.Module, "__call__"),
    (Mlp, nn.Linear, "__call__"),
    (Mlp, nn.Module, "_call_impl"),
    (Mlp, F, "linear"),
    (Mlp, F, "gelu"),
    (WITH_DROPOUT, F, "dropout"),
    (RELU, F, "relu"),
    (RELU, torch, "relu"),
    (TANH, torch.Tensor, "tanh"),
    (Packed, torch.Tensor, "chunk"),
    (PackedByTorch, torch, "chunk"),
    (Gated, torch.Tensor, "__mul__"),
    (Squared, torch.Tensor, "square"),
    (SquaredByAnOperator, torch.Tensor, "__pow__"),
    (GatedBySquares, torch.Tensor, "pow"),
    (Gated, F, "linear"),
    (sequential, nn.Linear, "forward"),
    (sequential, nn.Dropout, "forward"),
    (sequential, nn.Sequential, "forward"),
    (sequential, nn.Sequential, "__iter__"),
    (sequential, F, "linear"),
    (Function, F, "gelu"),
    (Mlp, Mlp, "forward"),
    (Keywords, Keywords, "forward"),
    (InMethod, InMethod, "_block"),
    (partial(made, "timm's Mlp"), nn.Identity, "forward"),
    (partial(made, "timm's Mlp"), nn.Dropout, "forward"),
    (partial(made, "a loop"), nn.ModuleList, "__iter__"),
    (partial(made, "diffusers' GELU"), as_diffusers.GELU, "forward"),
    (partial(made, "diffusers' GELU"), as_diffusers.GELU, "gelu"),
    (partial(made, "diffusers' GELU"), FeedForward, "forward"),
    (partial(made, "diffusers' GEGLU"), as_diffusers.GEGLU, "gelu"),
    (partial(made, "diffusers' GEGLU"), torch.Tensor, "chunk"),
    (partial(made, "diffusers' GEGLU"), F, "linear"),
    (partial(made, "diffusers' SwiGLU"), as_diffusers.SwiGLU, "forward"),
]


@contextmanager
def patched(owner, name):
    def replacement(*arguments, **options):
        calls.append(name)
        value = original(*arguments, **options)
        if isinstance(value, tuple):
            return tuple(2.0 + it for it in value)
        return 2.0 + value if isinstance(value, torch.Tensor) else value

    original, calls = getattr(owner, name), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, replacement)
        yield calls


@pytest.mark.parametrize("fused_first", [True, False], ids=["patched after fuse", "patched before"])
@pytest.mark.parametrize(("kind", "owner", "name"), PATCHES, ids=lambda it: getattr(it, "__name__", it))
def test_a_patch_is_called_as_often_as_in_the_plain_model(kind, owner, name, fused_first):
    plain, fused = kind(), kind()
    if fused_first:
        assert fuse(fused).fused
    with patched(owner, name) as calls:
        want, times = plain(X), len(calls)
        assert times
        if not fused_first:
            fuse(fused)
        calls.clear()
        with recorded_ops() as ran:
            got = fused(X)
        assert calls.count(name) == times
        if fused_first or owner is nn.Linear:  # otherwise the part that isn't patched may be fused
            assert ran == []
        assert_close(got, want, rtol=1e-5, atol=1e-5)
    if fused_first:
        with recorded_ops() as ran:
            assert_close(fused(X), kind()(X), rtol=1e-5, atol=1e-5)
        assert ran


class RecordsFunctions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, function, types, arguments=(), options=None):
        self.calls.append(getattr(function, "__name__", str(function)))
        return function(*arguments, **(options or {}))


class CountsLinears(torch.Tensor):
    calls = 0

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        cls.calls += function is F.linear
        return super().__torch_function__(function, types, arguments, options)


class MakesASubclass(nn.Module):
    def forward(self, x):
        return x.as_subclass(CountsLinears)


class MakesASubclassInAnExpression(Mlp):
    def __init__(self):
        super().__init__()
        self.mark = MakesASubclass()

    def forward(self, x):
        return self.fc2(self.act(self.fc1(self.mark(x))))


class MakesASubclassInAnEarlierExpression(MakesASubclassInAnExpression):
    def forward(self, x):
        h = self.act(self.fc1(self.mark(x)))
        return self.fc2(h)


@pytest.mark.parametrize("kind", [Mlp, Gated, Packed, WITH_DROPOUT, sequential])
def test_a_function_mode_sees_each_function(kind):
    plain, fused = kind(), kind()
    fuse(fused)
    seen = []
    for model in (plain, fused):
        with RecordsFunctions() as mode, recorded_ops() as ran:
            model(X)
        assert ran == []
        seen.append([it for it in mode.calls if it in ("linear", "gelu", "silu", "dropout", "mul", "chunk")])
    assert seen[0] == seen[1] != []


def test_a_default_device_does_not_stop_the_fused_op():
    model = Mlp()
    fuse(model)
    with torch.device("cpu"), recorded_ops() as ran:
        model(X)
    assert ran == ["mlp"]


@pytest.mark.parametrize("kind", [MakesASubclassInAnExpression, MakesASubclassInAnEarlierExpression])
def test_a_tensor_that_becomes_a_subclass_sees_each_function(kind):
    model = kind()
    fuse(model)
    CountsLinears.calls = 0
    with recorded_ops() as ran:
        assert type(model(X)) is CountsLinears
    assert (CountsLinears.calls, ran) == (2, [])
