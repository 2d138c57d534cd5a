"""A method that replaces one of a fused module's class later is called as on a plain module, whatever its arguments."""

import pytest
import torch
from torch import nn

from mpkernels.nn import fuse
from tests.nn.fusing.models import Mlp, assert_computes, recorded_ops

X = torch.linspace(-1, 1, 32).view(4, 8)


def scaled_class():
    """Return a new class for each test, because tests replace its methods."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.fc1, self.fc2, self.act = nn.Linear(8, 16), nn.Linear(16, 8), nn.GELU()

        def forward(self, x, a=1.0, b=2.0, *more, c=3.0, **options):
            return self.fc2(self.act(self.fc1(x))) * a + b + c

    return Scaled


def other_order(self, x, b=2.0, a=1.0, *, c=3.0):
    return x * a + b * 10 + c * 100


def other_default(self, x, a=5.0, b=7.0, *, c=11.0):
    return x * a + b * 10 + c * 100


def another_option(self, x, *, b=2.0, d=0.0):
    return x * b + d


def all_positional(self, x, *rest, c=0.0):
    return x * len(rest) + c


@pytest.mark.parametrize(
    ("new", "arguments", "named"),
    [
        (other_order, (), {"a": 3.0, "b": 5.0}),
        (other_order, (), {}),
        (other_default, (), {"b": 1.5}),
        (other_default, (4.0,), {}),
        (other_default, (), {"c": 0.5}),
        (another_option, (), {"b": 3.0, "d": 5.0}),
        (all_positional, (1.0, 2.0, 8.0, 9.0), {"c": 1.0}),
    ],
)
def test_a_replaced_forward_gets_its_arguments_as_given(new, arguments, named):
    kind = scaled_class()
    fused, plain = kind(), kind()
    assert fuse(fused).fused
    kind.forward = new
    assert torch.equal(fused(X, *arguments, **named), plain(X, *arguments, **named))


def test_a_replaced_generator_is_called():
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2, self.act = nn.Linear(8, 16), nn.Linear(16, 8), nn.GELU()

        def forward(self, x):
            return sum(self.parts(x))

        def parts(self, x):
            yield self.fc2(self.act(self.fc1(x)))

    fused = Parts()
    assert fuse(fused).fused
    Parts.parts = lambda self, x: iter([x, x])
    assert torch.equal(fused(X), 2 * X)


def test_an_activation_that_was_patched_and_restored_is_fused():
    activations = pytest.importorskip("transformers.activations")
    kind = activations.NewGELUActivation
    written = kind.forward

    def model():
        layers = scaled_class()()
        layers.act = kind()
        return layers

    kind.forward = lambda self, x: written(self, x)
    try:
        assert not fuse(model()).fused
    finally:
        kind.forward = written
    assert fuse(model()).fused


def test_a_forward_that_is_defined_again_is_fused_again():
    """A notebook's cell may be run again, with the same source or with another."""

    def again(self, x):
        return self.fc2(self.act(self.fc1(x)))

    def other(self, x):
        return self.act(self.fc1(x))

    class Net(Mlp):
        pass

    first = Net()
    assert fuse(first).fused
    for forward, op in ((again, "mlp"), (other, "linear_act"), (again, "mlp")):
        Net.forward = forward
        second = Net()
        want = [forward(it, X) for it in (first, second)]
        for model, expected in zip((first, second), want, strict=True):
            assert fuse(model).fused
            assert_computes(model, expected, [op], X)


def test_a_method_that_is_defined_again_is_fused_again():
    class Net(Mlp):
        def forward(self, x):
            return self.hidden(x)

        def hidden(self, x):
            return self.act(self.fc1(x))

    def hidden(self, x):
        return self.act(self.fc1(x))

    assert fuse(Net()).fused
    Net.hidden = hidden
    model = Net()
    assert fuse(model).fused
    with recorded_ops() as ran:
        model(X)
    assert ran == ["linear_act"]
