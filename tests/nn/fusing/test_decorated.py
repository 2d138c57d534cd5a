"""A forward beneath decorators is rewritten, and each decorator runs around it as before."""

import copy
import functools
import inspect
import warnings

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from mpkernels.nn import fuse, unfuse
from tests.nn.fusing.models import Mlp, X, compiled, recorded_ops

calls = []


def records_its_calls(name):
    def decorate(function):
        @functools.wraps(function)
        def run(self, *arguments, **options):
            calls.append(name)
            return function(self, *arguments, **options)

        return run

    return decorate


def renamed(old, new):
    """A decorator like transformers' deprecate_kwarg."""

    def decorate(function):
        names = set(inspect.signature(function).parameters)

        @functools.wraps(function)
        def run(*arguments, **options):
            assert new in names
            if old in options:
                warnings.warn(f"{old} is now {new}", FutureWarning, stacklevel=2)
                options[new] = options.pop(old)
            return function(*arguments, **options)

        return run

    return decorate


def counted(function):
    times = 0

    @functools.wraps(function)
    def run(self, *arguments, **options):
        nonlocal times
        times += 1
        run.times += 1
        run.total = times
        return function(self, *arguments, **options)

    run.times = 0
    return run


def marked(function):
    function.is_marked = True
    return function


class Renamed(Mlp):
    @renamed("scale", "factor")
    def forward(self, x, factor=1.0):
        return self.fc2(self.act(self.fc1(x))) * factor


class Twice(Mlp):
    @records_its_calls("outer")
    @records_its_calls("inner")
    def forward(self, x, *, factor: float = 2.0):
        """Multiply."""
        h = self.act(self.fc1(x))
        return factor * self.fc2(h)


class Counted(Mlp):
    @counted
    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class Marked(Mlp):
    @marked
    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class WithoutGrad(Mlp):
    @torch.no_grad()
    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class MethodIsDecorated(Mlp):
    def forward(self, x):
        return x + self.block(x)

    @records_its_calls("block")
    def block(self, x):
        return self.fc2(self.act(self.fc1(x)))


class WrapsForwardsOfSubclasses(nn.Module):
    """A base like transformers' GradientCheckpointingLayer: each subclass wraps its forward once more."""

    def __init_subclass__(cls):
        forward = cls.forward

        @functools.wraps(forward)
        def run(self, *arguments, **options):
            if type(self).forward is run:
                calls.append("layer")
            return forward(self, *arguments, **options)

        cls.forward = run


class Layer(WrapsForwardsOfSubclasses):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.act, self.fc2 = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)

    @records_its_calls("inner")
    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


KINDS = [Renamed, Twice, Counted, Marked, WithoutGrad, MethodIsDecorated, Layer]


@pytest.mark.parametrize("kind", KINDS, ids=lambda it: it.__name__)
def test_decorators_run_around_the_fused_forward(kind):
    plain, fused = kind(), kind()
    calls.clear()
    want, expected = plain(X), calls.copy()
    assert fuse(fused).fused
    for model in (fused, copy.deepcopy(fused)):
        calls.clear()
        with recorded_ops() as ran:
            got = model(X)
        assert (calls, ran) == (expected, ["mlp"])
        assert got.requires_grad == want.requires_grad
        assert_close(got, want, rtol=1e-5, atol=1e-5)
    unfuse(fused)
    assert type(fused) is kind
    assert_close(fused(X), want, rtol=0, atol=0)


def test_a_decorator_that_renames_an_argument_still_does():
    model = Renamed()
    fuse(model)
    with pytest.warns(FutureWarning, match="scale is now factor"), recorded_ops() as ran:
        got = model(X, scale=3.0)
    assert ran == ["mlp"]
    assert_close(got, Renamed()(X, 3.0), rtol=1e-5, atol=1e-5)


def test_a_decorators_count_goes_on():
    model = Counted()
    before = Counted.forward.total if hasattr(Counted.forward, "total") else 0
    model(X)
    fuse(model)
    model(X)
    for forward in (Counted.forward, type(model).forward):
        assert (forward.total, forward.times) == (before + 2, before + 2)


def test_signature_source_and_docstring_are_those_of_the_plain_forward():
    model = Twice()
    fuse(model)
    ours, theirs = type(model).forward, Twice.forward
    assert inspect.signature(ours) == inspect.signature(theirs)
    assert inspect.getsource(ours) == inspect.getsource(theirs)
    assert (ours.__doc__, ours.__qualname__, ours.__name__) == ("Multiply.", "Twice.forward", "forward")


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch.compile
@pytest.mark.parametrize("kind", [Renamed, Twice])
def test_a_decorated_forward_is_fused_when_compiled(kind):
    model = kind()
    want = model(X)
    fuse(model)
    run, graphs = compiled(model)
    assert_close(run(X), want, rtol=1e-5, atol=1e-5)
    assert "mpkernels." in "".join(graphs)
    torch.compiler.reset()


def test_a_decorated_forward_that_is_replaced_runs_without_the_old_decorators():
    class Old(Mlp):
        @records_its_calls("outer")
        @records_its_calls("inner")
        def forward(self, x, factor=1.0):
            return self.fc2(self.act(self.fc1(x))) * factor

    def new(self, x, *, power=2):
        return x**power

    model = Old()
    assert fuse(model).fused
    Old.forward = new
    calls.clear()
    assert torch.equal(model(X, power=3), X**3)
    assert calls == []
    Old.forward = records_its_calls("new")(new)
    assert torch.equal(model(X), X**2)
    assert calls == ["new"]
