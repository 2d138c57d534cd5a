"""What a call of linear_act is known again by: calls that one kernel may not serve alike are told apart."""

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import mpkernels
from mpkernels.linear.choice import key_of
from mpkernels.ops.linear.kind import Kind

X, WEIGHT, BIAS = torch.ones(2, 3), Parameter(torch.ones(4, 3)), Parameter(torch.ones(4))
CALL = {"x": X, "weight": WEIGHT, "bias": BIAS, "activation": "gelu"}
OTHERS = [
    {"x": torch.ones(3, 3)},
    {"x": torch.ones(2, 1, 3)},
    {"x": torch.ones(3)},
    {"x": torch.ones(2, 3, dtype=torch.bfloat16)},
    {"x": torch.ones(2, 3, device="meta")},
    {"x": torch.ones(3, 2).t()},
    {"x": X.to_sparse()},
    {"x": torch.ones(()).expand(2, 3)},
    {"weight": Parameter(torch.ones(5, 3))},
    {"weight": Parameter(torch.ones(4, 3, dtype=torch.bfloat16))},
    {"weight": Parameter(torch.ones(3, 4).t())},
    {"bias": None},
    {"bias": Parameter(torch.ones(1))},
    {"bias": Parameter(torch.ones(1, 4))},
    {"activation": "relu"},
]


def key(**changes):
    x, weight, bias, activation = (CALL | changes).values()
    return key_of(Kind("linear_act", activation), x, weight, bias, ())


@pytest.mark.parametrize("other", OTHERS, ids=repr)
def test_calls_are_told_apart(other):
    assert None not in (key(), key(**other))
    assert key() != key(**other)
    assert key(**other) == key(**other)


def test_equal_calls_are_one():
    changed = {"x": torch.randn(4, 6)[::2, :3], "weight": torch.randn(4, 3, requires_grad=True), "bias": BIAS * 2}
    assert key() == key(**changed)


@pytest.mark.parametrize("name", ["x", "weight", "bias"])
def test_whether_it_trains(name):
    frozen = {each: CALL[each].detach() for each in ("x", "weight", "bias")}
    training = frozen | {name: frozen[name].clone().requires_grad_()}
    assert key(**frozen) != key(**training)
    before = key(**training)
    with torch.no_grad():
        assert key(**training) != before


def test_the_ways_of_the_thread():
    plain = key()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = key()
    with torch.autocast("cpu", dtype=torch.float16):
        assert len({plain, cast, key()}) == 3
    with torch.autocast("cpu", enabled=False):
        assert key() not in (None, cast)
    torch.use_deterministic_algorithms(True)
    try:
        assert key() == plain  # which has no say
    finally:
        torch.use_deterministic_algorithms(False)
    with mpkernels.backend("reference"):
        assert key() is None


class Sub(Tensor):
    pass


class SubParameter(Parameter):
    pass


class Name(str):
    pass


STRANGE = {
    "x": [X.as_subclass(Sub), Parameter(X), None, 1.0, torch.ones(())],
    "weight": [WEIGHT.detach().as_subclass(Sub), SubParameter(WEIGHT)],
    "bias": [BIAS.detach().as_subclass(Sub), SubParameter(BIAS)],
    "activation": [Name("gelu"), None, b"gelu", torch.nn.GELU()],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in STRANGE for value in STRANGE[name]], ids=repr)
def test_no_ordinary_call(name, value):
    assert key(**{name: value}) is None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_none():
    assert key(x=torch.nested.nested_tensor([X])) is None


def test_a_sparse_one_is_no_expanded_one():
    assert key(x=X.to_sparse()) != key(x=torch.ones(()).expand(2, 3))
