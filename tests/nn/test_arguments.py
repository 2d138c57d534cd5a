"""An argument in another argument's place is refused, and the error says where it belongs."""

import re
from functools import partial

import pytest
import torch
from torch import nn

from mpkernels import functional, selector
from mpkernels.nn import MLP, GatedLinear, LinearAct

RELU = nn.ReLU()
MADE = {"LinearAct": (LinearAct, (8, 6)), "GatedLinear": (GatedLinear, (8, 6)), "MLP": (MLP, (8, 16, 6))}
EACH_CLASS = pytest.mark.parametrize("who", MADE)
ACTIVATIONS = [
    ("relu", "'relu'; did you mean activation='relu'?"),
    ("SiLU", "'SiLU'; did you mean activation='silu'?"),
    (RELU, "ReLU(); did you mean activation=ReLU()?"),
    (nn.GELU, f"{nn.GELU!r}; did you mean activation={nn.GELU!r}?"),
]


def refused(text, call, kind=TypeError):
    with pytest.raises(kind, match=f"^{re.escape(text)}$"):
        call()


@EACH_CLASS
@pytest.mark.parametrize(
    ("given", "got"),
    [*ACTIVATIONS, ("swish", "'swish'"), (1, "1"), (0, "0"), (None, "None")],
    ids=repr,
)
def test_a_bias_that_is_no_bool_is_refused(who, given, got):
    """Taken for True, "relu" would silently leave the default activation in place."""
    make, sizes = MADE[who]
    refused(f"{who}: bias must be a bool, got {got}", partial(make, *sizes, given))
    refused(f"{who}: bias must be a bool, got {got}", partial(make, *sizes, bias=given))


@EACH_CLASS
@pytest.mark.parametrize(("given", "got"), ACTIVATIONS, ids=repr)
def test_an_activation_in_place_of_device_or_dtype_is_refused(who, given, got):
    make, sizes = MADE[who]
    refused(f"{who}: device must be a torch.device, got {got}", partial(make, *sizes, True, given))
    refused(f"{who}: dtype must be a torch.dtype, got {got}", partial(make, *sizes, True, None, given))


@pytest.mark.parametrize(("given", "got"), ACTIVATIONS, ids=repr)
def test_an_activation_in_place_of_a_width_is_refused(given, got):
    refused(f"MLP: out_features must be an int or None, got {got}", lambda: MLP(8, 16, given))
    refused(f"MLP: hidden_features must be an int, got {got}", lambda: MLP(8, given))
    refused(f"LinearAct: out_features must be an int, got {got}", lambda: LinearAct(8, given))
    refused(f"MLP: in_features must be an int, got {got}", lambda: MLP(given, 8))
    refused(f"GatedLinear: in_features must be an int, got {got}", lambda: GatedLinear(given, 8))


def test_a_bias_in_place_of_a_width_is_refused():
    """False in place of a width would make a layer without outputs."""
    refused("MLP: out_features must be an int or None, got False; did you mean bias=False?", lambda: MLP(8, 16, False))
    refused("LinearAct: out_features must be an int, got True; did you mean bias=True?", lambda: LinearAct(8, True))


@EACH_CLASS
@pytest.mark.parametrize("given", [8.0, "8", None])
def test_a_width_that_is_no_int_is_refused(who, given):
    make, (_, *sizes) = MADE[who]
    refused(f"{who}: in_features must be an int, got {given!r}", lambda: make(given, *sizes))


def test_a_width_may_be_anything_that_counts_as_an_int():
    class Int:
        def __index__(self):
            return 8

    for width in (torch.tensor(8).numpy()[()], Int()):
        assert LinearAct(width, 6).weight.shape == MLP(width, 6).fc1_weight.shape == (6, 8)
    with pytest.raises(RuntimeError, match="negative dimension"):
        LinearAct(-1, 6)


@pytest.mark.parametrize("name", ["gated", "recompute"])
@pytest.mark.parametrize(("given", "got"), [*ACTIVATIONS, ("no", "'no'"), (1, "1")], ids=repr)
def test_options_of_an_mlp_that_are_no_bools_are_refused(name, given, got):
    refused(f"MLP: {name} must be a bool, got {got}", lambda: MLP(8, 16, **{name: given}))


@pytest.mark.parametrize(("given", "got"), [*ACTIVATIONS, ("0.1", "'0.1'"), (True, "True"), (None, "None")], ids=repr)
def test_a_dropout_that_is_no_number_is_refused(given, got):
    """True would drop everything."""
    refused(f"MLP: dropout must be a number, got {got}", lambda: MLP(8, 16, dropout=given))
    for training in (True, False):
        call = partial(FUNCTIONS["mlp"], dropout=given, training=training)
        refused(f"mlp: dropout must be a number, got {got}", call)
        refused("mlp: dropout must be between 0 and 1, got 1.5", partial(call, dropout=1.5), ValueError)


x, square = torch.ones(2, 8), torch.ones(8, 8)
FUNCTIONS = {
    "linear_act": partial(functional.linear_act, x, square),
    "gated_linear": partial(functional.gated_linear, x, square),
    "mlp": partial(functional.mlp, x, square, None, square, None),
    "gated_mlp": partial(functional.gated_mlp, x, square, square, square),
}
PLACES = [
    ("linear_act", "bias"),
    ("gated_linear", "up_weight"),
    ("gated_linear", "gate_bias"),
    ("gated_linear", "up_bias"),
    ("gated_mlp", "gate_bias"),
    ("gated_mlp", "up_bias"),
    ("gated_mlp", "down_bias"),
]


@pytest.mark.parametrize("kernel", [None, "native", "torch"])
@pytest.mark.parametrize(("given", "got"), ACTIVATIONS, ids=repr)
@pytest.mark.parametrize(("who", "name"), PLACES)
def test_an_activation_in_place_of_a_tensor_is_refused(who, name, given, got, kernel):
    selector.pin(kernel)
    try:
        for _ in range(2):  # the second time, the selector knows the call
            FUNCTIONS[who]()
            refused(f"{who}: {name} must be a tensor, got {got}", partial(FUNCTIONS[who], **{name: given}))
    finally:
        selector.pin(None)


def test_an_activation_in_place_of_a_bias_of_mlp_is_refused():
    call = partial(functional.mlp, x, square, None, square, "relu")
    refused("mlp: fc2_bias must be a tensor, got 'relu'; did you mean activation='relu'?", call)
    refused("mlp: fc1_bias must be a tensor, got 'relu'; did you mean activation='relu'?",
            partial(functional.mlp, x, square, "relu", square, None))  # fmt: skip


@pytest.mark.parametrize("who", ["mlp", "gated_mlp"])
@pytest.mark.parametrize("name", ["training", "recompute"])
@pytest.mark.parametrize("given", ["no", 1, None])
def test_options_of_functions_that_are_no_bools_are_refused(who, name, given):
    refused(f"{who}: {name} must be a bool, got {given!r}", partial(FUNCTIONS[who], **{name: given}))


def test_from_linear_takes_only_a_linear():
    refused("LinearAct.from_linear: linear must be a torch.nn.Linear, got 'relu'; did you mean activation='relu'?",
            lambda: LinearAct.from_linear("relu"))  # fmt: skip
    refused("LinearAct.from_linear: linear must be a torch.nn.Linear, got None", lambda: LinearAct.from_linear(None))
    with pytest.raises(ValueError, match=r"^LinearAct.from_linear: activation must be one of .*, got 3$"):
        LinearAct.from_linear(nn.Linear(8, 6), 3)
