"""An argument in another argument's place is refused, and the error says where it belongs."""

import re
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn

from mpkernels import functional, selector
from mpkernels.nn import MLP, GatedLinear, LinearAct

ACTIVATIONS = {
    "relu": "'relu'; did you mean activation='relu'?",
    "SiLU": "'SiLU'; did you mean activation='silu'?",
    nn.ReLU(): "ReLU(); did you mean activation=ReLU()?",
    nn.GELU: f"{nn.GELU!r}; did you mean activation={nn.GELU!r}?",
}
x, square = torch.ones(2, 8), torch.ones(8, 8)
CLASSES = {
    "LinearAct": partial(LinearAct, in_features=8, out_features=6),
    "GatedLinear": partial(GatedLinear, in_features=8, out_features=6),
    "MLP": partial(MLP, in_features=8, hidden_features=16, out_features=6),
}
CALLS = CLASSES | {
    "linear_act": partial(functional.linear_act, x, square),
    "gated_linear": partial(functional.gated_linear, x, square),
    "mlp": partial(functional.mlp, x, square, fc1_bias=None, fc2_weight=square, fc2_bias=None),
    "gated_mlp": partial(functional.gated_mlp, x, square, square, square),
}
PLACES = [  # who is called, the arguments, what they must be, and what is refused beside activations
    (CLASSES, "bias", "a bool", ["swish", 1, 0, None]),
    (CLASSES, "device", "a torch.device", []),
    (CLASSES, "dtype", "a torch.dtype", []),
    (CLASSES, "in_features", "an int", [8.0, "8", None, True]),
    (["LinearAct", "GatedLinear"], "out_features", "an int", [True]),
    (["MLP"], "hidden_features", "an int", [True]),
    (["MLP"], "out_features", "an int or None", [False]),  # it would make a layer without outputs
    (["MLP"], "gated recompute", "a bool", ["no", 1]),
    (["mlp", "gated_mlp"], "training recompute", "a bool", ["no", 1, None]),
    (["MLP", "mlp"], "dropout", "a number", ["0.1", True, None]),  # True would drop everything
    (["linear_act"], "bias", "a tensor", []),
    (["gated_linear"], "up_weight gate_bias up_bias", "a tensor", []),
    (["mlp"], "fc1_bias fc2_bias", "a tensor", []),
    (["gated_mlp"], "gate_bias up_bias down_bias", "a tensor", []),
]
CASES = [(who, name, *rest) for whos, names, *rest in PLACES for who, name in product(whos, names.split())]


@pytest.fixture(params=[None, "native", "torch"])
def _pinned(request):
    selector.pin(request.param)
    yield
    selector.pin(None)


@pytest.mark.usefixtures("_pinned")
@pytest.mark.parametrize(("who", "name", "wanted", "others"), CASES, ids=lambda it: it if isinstance(it, str) else "")
def test_what_belongs_elsewhere_is_refused(who, name, wanted, others):
    """Taken for True, "relu" would silently leave the default activation in place."""
    for given in [*ACTIVATIONS, *others]:
        got = ACTIVATIONS[given] if given in ACTIVATIONS else repr(given)
        if isinstance(given, bool) and wanted.startswith("an int"):
            got += f"; did you mean bias={given}?"
        for _ in range(2):  # the second time, the selector knows the call
            CALLS[who]()
            with pytest.raises(TypeError, match=f"^{re.escape(f'{who}: {name} must be {wanted}, got {got}')}$"):
                CALLS[who](**{name: given})


KNOWN = "one of none, relu, relu2, gelu, gelu_tanh, silu, sigmoid, tanh"
VALUES = [
    ("GatedLinear", {"activation": "swish"}, f"activation must be {KNOWN}, got 'swish'"),
    ("MLP", {"activation": 3}, f"activation must be {KNOWN}, got 3"),
    ("MLP", {"dropout": -0.1}, "dropout must be between 0 and 1, got -0.1"),
    ("mlp", {"dropout": 1.5}, "dropout must be between 0 and 1, got 1.5"),
    ("mlp", {"dropout": 1.5, "training": False}, "dropout must be between 0 and 1, got 1.5"),
]


@pytest.mark.parametrize(("who", "options", "text"), VALUES)
def test_a_value_that_is_out_of_range_is_refused(who, options, text):
    with pytest.raises(ValueError, match=f"^{re.escape(f'{who}: {text}')}$"):
        CALLS[who](**options)


@pytest.mark.parametrize(("kind", "sizes"), [(LinearAct, 2), (GatedLinear, 2), (MLP, 3)])
def test_arguments_have_the_order_of_linears(kind, sizes):
    params = dict(kind(*range(7, 7 + sizes), False, "meta", torch.bfloat16).named_parameters())
    assert all("weight" in name for name in params)
    assert {(it.is_meta, it.dtype) for it in params.values()} == {(True, torch.bfloat16)}
    assert next(iter(params.values())).shape == (8, 7)


def test_a_width_may_be_anything_that_counts_as_an_int():
    class Int:
        def __index__(self):
            return 8

    for width in (torch.tensor(8).numpy()[()], Int()):
        assert LinearAct(width, 6).weight.shape == MLP(width, 6).fc1_weight.shape == (6, 8)
    with pytest.raises(RuntimeError, match="negative dimension"):
        LinearAct(-1, 6)


@pytest.mark.parametrize("given", ["relu", None])
def test_from_linear_takes_only_a_linear(given):
    text = f"LinearAct.from_linear: linear must be a torch.nn.Linear, got {ACTIVATIONS.get(given, given)}"
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        LinearAct.from_linear(given)
    with pytest.raises(ValueError, match=r"^LinearAct.from_linear: activation must be one of .*, got 3$"):
        LinearAct.from_linear(nn.Linear(8, 6), 3)
