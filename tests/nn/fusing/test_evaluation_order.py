"""A rewritten forward evaluates everything in the order in which it was written, as far as anyone can tell."""

import contextlib
import weakref

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.testing import assert_close

from mpkernels.nn import fuse
from tests.nn.fusing.models import Mlp, X, forms_of, recorded_ops

BETWEEN = "something else is evaluated between its calls"


class Effects(Mlp):
    """A base with methods that change what a forward reads."""

    def __init__(self):
        super().__init__()
        self.relu_, self.gate, self.scale = nn.ReLU(inplace=True), nn.Linear(8, 16), 0.5
        self.other = nn.Linear(16, 8)
        self.spare, self.seen = nn.Linear(8, 32), []

    def swap_layers(self, x):
        self.fc1, self.gate = self.gate, self.fc1
        return x * 1

    def exchange_layers(self):
        self.fc2, self.other = self.other, self.fc2
        return 0

    def draw(self, x):
        return torch.rand_like(x)


class InOrder:
    """Each method is a forward."""

    def in_place_before(self, x):
        h = self.act(self.fc1(x))
        return self.relu_(x) + self.fc2(h)

    def walrus(self, x):
        h = self.act(self.fc1(x))
        return (x := x * 3) + self.fc2(h) + x

    def conditional(self, x):
        h = F.dropout(self.act(self.fc1(x)), 0.5, True)
        return x * 1 if self.training else self.fc2(h)  # numbers are drawn in either case

    def compared_in_a_chain(self, x):
        h = F.dropout(self.act(self.fc1(x)), 0.5, True)
        return x + (self.scale > 1 > self.fc2(h))  # 0.5 > 1 decides

    def comprehension(self, x):
        h = self.act(self.fc1(x))
        return sum([it.mul_(2).sum() for it in (x,)]) + self.fc2(h)

    def formatted(self, x):
        h = self.act(self.fc1(x))
        return {f"{x.mul_(2).sum()}": self.fc2(h)}.popitem()[1]

    def read_by_a_generator(self, x):
        later = (h.sum() for _ in range(1))  # noqa: F821
        h = self.fc1(x)
        y = self.act(h)
        return y + next(later)

    def read_after_a_suppressed_error(self, x):
        with contextlib.suppress(TypeError):
            x = self.fc1(x)
            x = self.act(x) + torch.Size
        return x

    def read_after_a_return_that_fails(self, x):
        h = x
        try:
            h = self.fc1(x)
            return self.act(h) + torch.Size
        except TypeError:
            return h

    def read_by_vars(self, x):
        h = self.fc1(x)
        y = self.act(h)
        return y + vars()["h"]


class BecomeMlps:
    def swaps_its_layer(self, x):
        return self.fc2(self.act(self.fc1(self.swap_layers(x))))

    def swaps_its_layer_before(self, x):
        h = self.act(self.fc1(self.swap_layers(x)))
        return self.fc2(h)

    def changes_its_input(self, x):
        x = x * 1
        y = self.relu_(x) + self.fc2(self.act(self.fc1(x)))
        return y + self.fc2(self.act(self.fc1(x.mul_(2)))) + x

    def numbers_in_order(self, x):
        return self.fc2(F.dropout(self.act(self.fc1(self.draw(x))), 0.0, False)) + self.draw(x)


class InPlaceBeforeALayer(Effects):
    def forward(self, x):
        h = self.fc1(x)
        return self.relu_(x).sum() + self.act(h)


class GatedMlpInPlace(Effects):
    def forward(self, x):
        gate = self.act(self.fc1(x))
        h = gate * self.up(x)
        return x.neg_() + self.fc2(h)


class PackedInPlace(Effects):
    def forward(self, x):
        gate, up = self.packed(x).chunk(2, dim=-1)
        return x.neg_().sum() + self.act(gate) * up


class RateIsComputed(Effects):
    def forward(self, x):
        h = F.dropout(self.act(self.fc1(x)), self.rate_of(x), self.training)
        return self.fc2(h)

    def rate_of(self, x):
        x.mul_(2)
        return 0.0


class AugmentedAssignment(Effects):
    def forward(self, x):
        parts = [x]
        h = self.act(self.fc1(x))
        parts[self.put(x)] += self.fc2(h)
        return parts[0]

    def put(self, x):
        x.mul_(2)
        return 0


class Property(Effects):
    @property
    def factor(self):
        self.seen.append(self.fc2)
        self.exchange_layers()
        return 2

    def forward(self, x):
        h = self.act(self.fc1(x))
        return self.factor * self.fc2(h)


LEFT_IN_ORDER = InPlaceBeforeALayer, GatedMlpInPlace, PackedInPlace
ORDERED = [*forms_of(InOrder, Effects), *LEFT_IN_ORDER, RateIsComputed, AugmentedAssignment, Property]


class SwapsItsPackedLayer(Effects):
    def swap_layers(self, x):
        self.packed, self.spare = self.spare, self.packed
        return x * 1

    def forward(self, x):
        gate, up = torch.chunk(self.packed(self.swap_layers(x)), 2, dim=-1)
        return up * self.act(gate)


def outcome_of_a_call(model, is_training=True):
    """Return the name of the error that a call raises, and a list: result, input, gradients, state of the modules, and
    the next random numbers."""
    x, error, y = X.clone().requires_grad_(is_training), "", None
    with torch.random.fork_rng(), torch.set_grad_enabled(is_training):
        torch.manual_seed(5)
        given = x * 1
        try:
            y = model(given)
            if y.requires_grad:
                y.square().sum().backward()
        except (RuntimeError, TypeError, UnboundLocalError) as raised:
            error = type(raised).__name__
        grads = [] if error else [x.grad, *(it.grad for it in model.parameters())]
        tensors = [given, *grads, *model.state_dict().values(), torch.rand(2)]
    return error, [None if it is None else it.detach() for it in (y, *tensors)]


def assert_same(ours, theirs):
    assert ours[0] == theirs[0]
    assert_close(ours[1], theirs[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("kind", ORDERED, ids=lambda it: it.__name__)
def test_a_fused_model_has_the_effects_of_the_plain_one_in_the_same_order(kind, is_training):
    torch.manual_seed(0)
    plain, fused = kind(), kind()
    fused.load_state_dict(plain.state_dict())
    fuse(fused)
    assert_same(outcome_of_a_call(fused, is_training), outcome_of_a_call(plain, is_training))


@pytest.mark.parametrize("kind", LEFT_IN_ORDER, ids=lambda it: it.__name__)
def test_a_site_that_would_be_reordered_is_left_with_the_reason(kind):
    left = [site.reason for site in fuse(kind()).left]
    assert left == [BETWEEN] or (kind is GatedMlpInPlace and left == [])


SWAPS, SWAPS_BEFORE, CHANGES_ITS_INPUT, NUMBERS = forms_of(BecomeMlps, Effects)
FUSED_IN_ORDER = {
    **{key: ["mlp"] for key in (SWAPS, SWAPS_BEFORE, NUMBERS)},
    CHANGES_ITS_INPUT: ["mlp", "mlp"],
    SwapsItsPackedLayer: ["gated_linear"],
}


@pytest.mark.parametrize(("kind", "ops"), FUSED_IN_ORDER.items(), ids=lambda it: getattr(it, "__name__", ""))
def test_an_expression_is_evaluated_once_and_in_its_place(kind, ops):
    torch.manual_seed(0)
    plain, fused = kind(), kind()
    fused.load_state_dict(plain.state_dict())
    fuse(fused)
    with recorded_ops() as ran:
        got = outcome_of_a_call(fused)
    assert ran == ops
    assert_same(got, outcome_of_a_call(plain))


@pytest.mark.parametrize("kind", FUSED_IN_ORDER, ids=lambda it: it.__name__)
def test_where_the_plain_lines_run_an_expression_is_evaluated_once(kind):
    torch.manual_seed(0)
    plain, fused = kind(), kind()
    fused.load_state_dict(plain.state_dict())
    assert fuse(fused).fused
    for model in (plain, fused):
        model.act.register_forward_hook(lambda *_: None)
    with recorded_ops() as ran:
        got = outcome_of_a_call(fused)
    assert ran == []
    assert_same(got, outcome_of_a_call(plain))


class LooksForItsInput(Effects):
    def doubled(self, x):
        y = x * 2
        self.given = weakref.ref(y)
        return y

    def forward(self, x):
        y = self.fc2(self.act(self.fc1(self.doubled(x))))
        self.is_kept = self.given() is not None
        return y


@torch.no_grad()
def test_the_input_that_an_expression_made_is_freed_after_its_statement():
    """The rewritten statement gives the layer's input a name, which must not keep this large tensor."""
    plain, fused = LooksForItsInput(), LooksForItsInput()
    fuse(fused)
    with recorded_ops() as ran:
        fused(X)
    plain(X)
    assert ran == ["mlp"]
    assert (plain.is_kept, fused.is_kept) == (False, False)
