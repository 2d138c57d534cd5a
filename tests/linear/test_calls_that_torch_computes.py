"""torch computes calls that no kernel of ours serves, even if a similar call before was served by one."""

from contextlib import nullcontext

import pytest
import torch
from torch.nn import Parameter, functional

import mpkernels
from mpkernels.functional import linear_act
from tests.linear.choosing import computed_by, forget_choices
from tests.linear_cases import TORCH, torchs

X, WEIGHT, BIAS = torch.randn(6, 8), torch.randn(6, 8), torch.randn(6)


class UsersTensor(torch.Tensor):
    """A tensor subclass with a linear of its own."""

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        result = super().__torch_function__(function, types, arguments, options)
        return -result if function is functional.linear else result


CHANGES = {
    "a row": {"x": X[0]},
    "3-D": {"x": X.view(2, 3, 8)},
    "on another device": {"x": X.to("meta"), "weight": WEIGHT.to("meta"), "bias": BIAS.to("meta")},
    "complex": {"x": X.cfloat(), "weight": WEIGHT.cfloat(), "bias": BIAS.cfloat()},
    "integers": {"x": X.int(), "weight": WEIGHT.int(), "bias": BIAS.int(), "activation": "relu"},
    "nested": {"x": lambda: torch.nested.nested_tensor([X[:2], X])},
    "jagged": {"x": lambda: torch.nested.nested_tensor([X[:2], X], layout=torch.jagged)},
    "sparse": {"x": X.to_sparse(), "activation": "none", "bias": None},
    "expanded": {"x": torch.ones(()).expand(6, 8)},
    "a subclass": {"x": X.as_subclass(UsersTensor)},
    "a weight of a subclass": {"weight": WEIGHT.as_subclass(UsersTensor)},
    "a bias of a subclass": {"bias": BIAS.as_subclass(UsersTensor)},
    "one bias for all": {"bias": BIAS[:1]},
    "a bias of one dimension more": {"bias": BIAS[None]},
    "a bias for each number": {"bias": torch.randn(6, 6)},
    "a bias for each row": {"bias": BIAS[:, None]},
    "a weight that trains": {"weight": Parameter(WEIGHT)},
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_torch_computes_a_call_that_no_kernel_serves(monkeypatch, changes, forced):
    """A kernel serves the similar calls before and after."""
    forget_choices(monkeypatch)
    computed_by(monkeypatch, "native")
    plain = {"x": X, "weight": WEIGHT, "bias": BIAS, "activation": "tanh"}
    other = plain | {name: it() if callable(it) else it for name, it in changes.items()}
    with mpkernels.backend("native") if forced else nullcontext():
        for call in (plain, other, plain):
            got, want = linear_act(**call), torchs(**call)
            assert (type(got), got.layout, got.requires_grad) == (type(want), want.layout, want.requires_grad)
            if got.is_nested:
                got, want = (it.to_padded_tensor(0) for it in (got, want))
            assert got.shape == want.shape
            if not got.is_meta:
                torch.testing.assert_close(got, want)


def test_a_sparse_x_is_not_taken_for_an_expanded_one(monkeypatch):
    """An expanded x has strides of 0, a sparse x has none."""
    forget_choices(monkeypatch)
    computed_by(monkeypatch, "native")
    for x in (torch.ones(()).expand(6, 8), X.to_sparse()):
        torch.testing.assert_close(linear_act(x, WEIGHT, None, "none"), torchs(x, WEIGHT, None, "none"))


@pytest.mark.parametrize("activation", TORCH)
def test_vmap_calls_an_activation_once_for_all(activation):
    """It warns that it is slow where it calls a function in place for each row."""
    arguments = WEIGHT, BIAS, activation
    with torch.no_grad():
        got = torch.func.vmap(linear_act, in_dims=(0, None, None, None))(X.view(2, 3, 8), *arguments)
    torch.testing.assert_close(got, torchs(X, *arguments).view(2, 3, 6))


class NotInPlace(torch.Tensor):
    """A tensor subclass that can't be overwritten."""

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        name = function.__name__
        assert not name.endswith("_") or name.startswith("__"), name
        return super().__torch_function__(function, types, arguments, options)


@torch.no_grad()
@pytest.mark.parametrize("activation", TORCH)
def test_no_tensor_of_another_class_is_overwritten(activation):
    arguments = X.as_subclass(NotInPlace), WEIGHT, BIAS, activation
    torch.testing.assert_close(linear_act(*arguments), torchs(*arguments))
