"""What a call of linear_act is known again by: C++ and Python tell the same calls apart."""

import sys
from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from mpkernels import _glance
from mpkernels.functional import linear_act
from mpkernels.linear import choice
from mpkernels.ops.linear.activations import ACTIVATIONS

pytestmark = pytest.mark.skipif(_glance.describer() is None, reason="this torch shows nothing of its tensors")

look_in_python = choice._look_in_python
shapes = st.lists(st.integers(0, 3), max_size=4).map(tuple) | st.sampled_from([(2**33,), (2**33 + 1,)])
dtypes = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.bool])
calls = st.fixed_dictionaries(
    {
        "x": shapes,
        "weight": shapes.filter(lambda shape: len(shape) < 2) | st.tuples(st.integers(0, 3), st.integers(0, 3)),
        "dtype of x": dtypes,
        "dtype of weight": dtypes,
        "activation": st.sampled_from([*ACTIVATIONS, "swish", "ж", ""]),
        "bias": st.sampled_from([None, "fits", "another size", "another dtype", "a matrix"]),
        "x is transposed": st.booleans(),
        "weight is transposed": st.booleans(),
        "x trains": st.booleans(),
        "weight trains": st.booleans(),
        "bias trains": st.booleans(),
        "grad": st.booleans(),
    }
)


def tensor(shape, dtype, trains, is_transposed=False):
    """In as little memory as can be."""
    zeros = torch.zeros((), dtype=dtype).expand(shape)
    if not is_transposed and zeros.numel() < 2**33:
        zeros = torch.zeros(shape, dtype=dtype)
    return zeros.requires_grad_(trains and dtype.is_floating_point)


def keys(call):
    """C++'s, Python's."""
    x = tensor(call["x"], call["dtype of x"], call["x trains"], call["x is transposed"])
    weight = tensor(call["weight"], call["dtype of weight"], call["weight trains"], call["weight is transposed"])
    weight = Parameter(weight.detach(), weight.requires_grad)
    rows = call["weight"][0] if call["weight"] else 1
    bias_shape = {"another size": (rows + 1,), "a matrix": (rows, 1)}.get(call["bias"], (rows,))
    bias_dtype = torch.complex64 if call["bias"] == "another dtype" else call["dtype of weight"]
    bias = tensor(bias_shape, bias_dtype, call["bias trains"])
    bias = None if call["bias"] is None else Parameter(bias.detach(), bias.requires_grad)
    with torch.set_grad_enabled(call["grad"]):
        return [look(x, weight, bias, call["activation"]) for look in (_glance.describer(), look_in_python)]


def check_told_apart_alike(call, other):
    (c, python), (others_c, others_python) = keys(call), keys(other)
    assert (c is None) == (python is None) == (len(call["weight"]) != 2 or call["bias"] not in (None, "fits"))
    assert (c == others_c) == (python == others_python)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(calls, calls)
def test_calls_are_told_apart_alike(call, other):
    """As they differ in a single part, and in none."""
    for part in call:
        check_told_apart_alike(call, call | {part: other[part]})
    check_told_apart_alike(call, {**call})


CALL = dict.fromkeys(("x is transposed", "weight is transposed"), False) | {"bias": None}
CALL |= dict.fromkeys(("x trains", "weight trains", "bias trains", "grad"), False)
CALL |= {"x": (2, 3), "weight": (4, 3), "dtype of x": torch.float32, "dtype of weight": torch.float32}


@pytest.mark.parametrize(
    ("some", "others"),
    [
        ({"x": (4,)}, {"x": (4, 3)}),
        ({"x": (2, 4), "weight": (3, 3)}, {"x": (2,), "weight": (4, 3)}),
        ({"x": (3, 3), "weight": (2, 4)}, {"x": (2, 4), "weight": (3, 3)}),
        ({"activation": "gelu\0"}, {"activation": "gelu"}),
        ({"activation": "sixteen letters!"}, {"activation": "sixteen letters?"}),
    ],
)
def test_calls_that_look_alike(some, others):
    call = {"activation": "gelu"} | CALL
    assert keys(call | some)[0] != keys(call | others)[0]


@pytest.mark.parametrize("name", ["x is transposed", "weight is transposed"])
def test_layouts_are_told_apart(name):
    """Where there is one: strides say nothing of a dimension with one element."""
    call = {"activation": "gelu"} | CALL
    for c, others_c in zip(keys(call), keys(call | {name: True}), strict=True):
        assert c != others_c
    call |= {"x": (2, 1), "weight": (4, 1)}
    for c, others_c in zip(keys(call), keys(call | {name: True}), strict=True):
        assert c == others_c


def test_a_longer_name_is_no_activation():
    assert keys(CALL | {"activation": "seventeen letters"})[0] is None


class Sub(Tensor):
    pass


class SubParameter(Parameter):
    pass


class Name(str):
    pass


X, WEIGHT, BIAS = torch.ones(2, 3), Parameter(torch.ones(4, 3)), Parameter(torch.ones(4))
STRANGE = {
    "x": [X.as_subclass(Sub), Parameter(X), None, 1.0],
    "weight": [WEIGHT.detach().as_subclass(Sub), SubParameter(WEIGHT), None],
    "bias": [
        BIAS.detach().as_subclass(Sub),
        SubParameter(BIAS),
        1,
        Parameter(BIAS[:1]),
        Parameter(BIAS[0]),
        Parameter(BIAS.bfloat16()),
    ],
    "activation": [Name("gelu"), None, b"gelu"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in STRANGE for value in STRANGE[name]], ids=repr)
def test_no_ordinary_call(name, value):
    call = {"x": X, "weight": WEIGHT, "bias": BIAS, "activation": "gelu"} | {name: value}
    assert _glance.describer()(*call.values()) is look_in_python(*call.values()) is None


def test_weights_need_not_be_parameters():
    """functional's users have tensors."""
    for look in (_glance.describer(), look_in_python):
        for weight, bias in ((WEIGHT, BIAS), (WEIGHT.detach().requires_grad_(), BIAS.detach()), (WEIGHT, None)):
            assert look(X, weight, bias, "gelu") is not None


def test_any_number_of_dimensions():
    for dims in (0, 16, 17, 40):
        key = _glance.describer()(X.view((1,) * (dims - 2) + (2, 3)) if dims else X[0, 0], WEIGHT, BIAS, "gelu")
        assert (key is None) == (dims > 16)


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype:UserWarning")
@pytest.mark.parametrize("kind", ["batched", "meta", "sparse", "nested"])
def test_after_a_tensor_that_torch_cannot_show_python_looks(monkeypatch, kind):
    """Which takes a millisecond to raise an error, each time."""
    asked = []

    def look(*call):
        asked.append(call)
        return _glance.describer()(*call)

    monkeypatch.setattr(choice, "_look", look)
    linear_act(X, WEIGHT, BIAS)
    assert len(asked) == 1
    other = {
        "batched": lambda: torch.vmap(lambda x: linear_act(x, WEIGHT, BIAS))(X),
        "meta": lambda: linear_act(X.to("meta"), Parameter(WEIGHT.to("meta"))),
        "sparse": lambda: linear_act(X.to_sparse(), WEIGHT),
        "nested": lambda: linear_act(torch.nested.nested_tensor([X]), WEIGHT, BIAS),
    }[kind]
    want = linear_act(X, WEIGHT, BIAS)
    count = len(asked)
    for _ in range(3):
        other()
    assert torch.equal(linear_act(X, WEIGHT, BIAS), want)
    assert len(asked) == count + 1
    assert choice._look is look_in_python


def test_nothing_is_held_or_lost():
    look = _glance.describer()
    name = "".join(["ge", "lu"])
    kept = [X, WEIGHT, BIAS, name, None, True, False, Tensor, Parameter, str]
    strange = [(X.to("meta"), WEIGHT, BIAS, name), (X, WEIGHT, BIAS, "\ud800")]
    before = [sys.getrefcount(each) for each in kept]
    for bias, grad in product((BIAS, None), (True, False)):
        with torch.set_grad_enabled(grad):
            for _ in range(100):
                look(X, WEIGHT, bias, name)
                look(X, None, bias, name)
    for call in strange:
        for _ in range(100):
            with pytest.raises((RuntimeError, BufferError, UnicodeEncodeError)):
                look(*call)
    after = [sys.getrefcount(each) for each in kept]
    assert after[:4] == before[:4]
    assert all(abs(a - b) < 50 for a, b in zip(after, before, strict=True))


def test_an_error_of_a_mode_is_not_left_behind():
    """``requires_grad`` is asked of whoever listens to torch's functions."""

    class Refuses(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, arguments=(), options=None):
            raise ValueError("no")

    with Refuses():
        key = _glance.describer()(X, WEIGHT, BIAS, "gelu")
    with torch.no_grad():
        assert key == _glance.describer()(X, WEIGHT, BIAS, "gelu")
