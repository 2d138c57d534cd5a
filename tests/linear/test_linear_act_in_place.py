"""Where plain torch multiplies for a small layer and no backward needs z, C++ puts the activation over it."""

import sys
from contextlib import ExitStack, nullcontext

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mpkernels import _glance, functional, selector
from mpkernels.functional import linear_act
from mpkernels.ops.linear.activations import ACTIVATIONS
from mpkernels.selector import disk
from tests.cases import same_bits
from tests.linear_cases import TORCH

pytestmark = pytest.mark.skipif(_glance.activator() is None, reason="this torch shows nothing of its tensors")

MOST = 32768
SPECIAL = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-30, -1e-30, 60.0, -60.0]
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def sample(size, dtype):
    z = torch.randn(size, generator=torch.Generator().manual_seed(size)) * 4
    z[: len(SPECIAL)] = torch.tensor(SPECIAL)[:size]
    return z.to(dtype)


@dtypes
@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 1000, MOST])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_it_computes_what_the_layer_does(activation, size, dtype):
    """Rounded once, and nothing beside it is touched."""
    around = torch.full((size + 2,), 7.0, dtype=dtype)
    z, before = around[1:-1], sample(size, dtype)
    z.copy_(before)
    assert _glance.activator()(z, activation)
    exact = TORCH[activation](before.double())
    torch.testing.assert_close(z, exact.to(dtype), rtol=4 * torch.finfo(dtype).eps, atol=1e-7, equal_nan=True)
    assert around[0] == around[-1] == 7


X, WEIGHT, BIAS = torch.ones(5, 8), Parameter(torch.randn(6, 8)), Parameter(torch.randn(6))
NO_NAMES = "swish", "", "Gelu", None, b"gelu", "\ud800"


class Sub(Tensor):
    pass


OTHERS = {
    "too many": lambda: torch.randn(MOST + 1),
    "transposed": lambda: torch.randn(4, 4).t(),
    "with gaps": lambda: torch.randn(4, 4)[:, :2],
    "expanded": lambda: torch.randn(1).expand(4),
    "fp64": lambda: torch.randn(4).double(),
    "integers": lambda: torch.arange(-4, 4),
    "a subclass": lambda: torch.randn(4).as_subclass(Sub),
    "a parameter": lambda: Parameter(torch.randn(4)),
    "sparse": lambda: torch.randn(4).to_sparse(),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_the_rest_is_torchs(kind):
    z = OTHERS[kind]()
    before = z.detach().clone()
    assert _glance.activator()(z, "relu") is False
    assert torch.equal(z.to_dense(), before.to_dense())


@pytest.mark.parametrize(
    "what", [(X.to("meta"), "relu"), ([-1.0], "relu"), *((X, name) for name in NO_NAMES)], ids=repr
)
def test_nonsense(what):
    assert _glance.activator()(*what) is False


@pytest.fixture
def activated(monkeypatch, tmp_path):
    """The activations that C++ computed; plain torch is the fastest for all."""
    done, activate = [], _glance.activator()

    def activate_and_tell(z, activation):
        did = activate(z, activation)
        done.extend([activation] * did)
        return did

    for name, value in (("_is_deterministic", False), ("_known", {}), ("chosen", {})):
        monkeypatch.setattr(selector, name, value)
    monkeypatch.setattr(selector, "race", lambda runs, device: dict.fromkeys(runs, 2.0) | {"torch": 1.0})
    monkeypatch.setattr(disk, "path", lambda: tmp_path / "choices.json")
    monkeypatch.setattr(functional, "_activate", activate_and_tell)
    disk._read.cache_clear()
    yield done
    disk._read.cache_clear()


def plain(activation="gelu"):
    with torch.no_grad():
        return TORCH[activation](torch.nn.functional.linear(X, WEIGHT, BIAS))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name != "none"])
def test_layers_without_autograd(activated, activation, mode):
    before = X.clone()
    with mode():
        for _ in range(2):
            torch.testing.assert_close(linear_act(X, WEIGHT, BIAS, activation), plain(activation))
    assert activated == [activation] * 2
    assert same_bits(X, before)
    linear_act(X, WEIGHT, BIAS, activation).sum().backward()
    assert len(activated) == 2
    with torch.no_grad():
        big = torch.randn(MOST // 6 + 1, 8)
        want = TORCH[activation](torch.nn.functional.linear(big, WEIGHT, BIAS))
        torch.testing.assert_close(linear_act(big, WEIGHT, BIAS, activation), want)
    assert len(activated) == 2


def test_none_is_no_work(activated):
    with torch.no_grad():
        assert same_bits(linear_act(X, WEIGHT, BIAS, "none"), plain("none"))
    assert activated == []


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, arguments=(), options=None):
        return function(*arguments, **options or {})


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        return function(*arguments, **options or {})


WATCHED = {
    "function mode": lambda: within(Functions()),
    "dispatch mode": lambda: within(Dispatch()),
    "forward derivatives": lambda: within(forward_ad.dual_level()),
    "torch.jit.trace": lambda: torch.jit.trace(linear_act, (X, WEIGHT, BIAS), check_trace=False)(X, WEIGHT, BIAS),
    "torch.vmap": lambda: torch.vmap(lambda x: linear_act(x, WEIGHT, BIAS))(X),
    "torch.vmap over another": lambda: torch.vmap(lambda _: linear_act(X, WEIGHT, BIAS))(torch.ones(1))[0],
    "torch.compile": lambda: torch.compile(linear_act, backend="eager", fullgraph=True)(X, WEIGHT, BIAS),
}


def within(*contexts):
    with ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each)
        return linear_act(X, WEIGHT, BIAS)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("watched", WATCHED)
def test_who_goes_by_what_torch_calls_is_told(activated, watched):
    with torch.no_grad():
        within(nullcontext())
        assert activated.pop() == "gelu"
        torch.testing.assert_close(WATCHED[watched](), plain())
    assert activated == []


def test_nothing_is_held():
    name = "".join(["ge", "lu"])
    kept = [X, name, Tensor, Parameter]
    before = [sys.getrefcount(each) for each in kept]
    for _ in range(100):
        _glance.activator()(X.clone(), name)
        _glance.activator()(X, "swish")
    assert [sys.getrefcount(each) for each in kept] == before
