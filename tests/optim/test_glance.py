"""A step that goes by a glance at Python's objects does what one does that is handed lists; and what a glance can't see
goes the long way."""

import ctypes
import sys

import pytest
import torch
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mpkernels import _glance
from mpkernels.ops.adamw import adamw as op
from mpkernels.optim import AdamW
from tests.cases import same_bits

SIZES = (5, 3, 700, 1)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def made(dtype=torch.float32, sizes=SIZES, device="cpu", **options):
    generator = torch.Generator().manual_seed(0)
    params = [Parameter(torch.randn(size, generator=generator).to(device, dtype)) for size in sizes]
    return params, AdamW(params, lr=0.1, **options)


def put_grads(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.device, param.dtype)


@pytest.fixture
def calls(monkeypatch):
    """Of each step by a plan: whether it was given what was seen, how many grads, and whether that would do."""
    made_calls = []

    def on(device_type):
        by_plan = on_device(device_type)

        def call(handle, seen, params, grads, *rest):
            done = by_plan(handle, seen, params, grads, *rest)
            made_calls.append((seen is not None, len(grads), done))
            return done

        return call

    class Spied:
        pass

    on_device, Spied.on = op.by_plan.on, staticmethod(on)
    monkeypatch.setattr(op, "by_plan", Spied)
    monkeypatch.setattr("mpkernels.optim.table.Table._plan_for", plan_once)
    return made_calls


def plan_once(table, by_plan):
    """As _plan_for does, for a call that is spied on anew each time."""
    if table._by_plan is None:
        op.plan.on(table.device.type)(table._handle, *table._lists)
        table._by_plan = by_plan


needs_a_glance = pytest.mark.skipif(not _glance.can_see(), reason="this torch shows nothing of its tensors")
SEEN, IN_VAIN, BY_LISTS = (True, 0, True), (True, 0, False), (False, 2, True)


def test_this_torch_can_be_looked_at():
    """Else all of the below would go by lists, and nobody notice; an older one can't."""
    assert _glance.can_see() is (_glance.describer() is not None) is hasattr(torch.Tensor, "__dlpack_c_exchange_api__")


@needs_a_glance
def test_a_step_is_handed_no_list(calls):
    params, optimizer = made(sizes=(3, 4))
    for seed in range(4):
        put_grads(params, seed)
        optimizer.step()
    assert calls == [BY_LISTS, SEEN, SEEN, SEEN]


@needs_a_glance
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("options", [{}, {"max_norm": 1.0}, {"amsgrad": True}, {"state_dtype": torch.int8}], ids=str)
def test_it_does_the_same(target, dtype, options, monkeypatch):
    weights = []
    for sees in (True, False):
        with monkeypatch.context() as patch:
            if not sees:
                patch.setattr(_glance, "can_see", lambda: False)
            params, optimizer = made(dtype, device=target.device, **options)
            for seed in range(4):
                put_grads(params, seed)
                params[2].grad = None if seed == 2 else params[2].grad
                optimizer.step()
            weights.append(torch.cat([param.detach().double() for param in params]))
    assert same_bits(*weights)


class Sub(torch.Tensor):
    pass


class SubParameter(Parameter):
    pass


def negated(grad):
    """Its memory holds the negatives."""
    return torch._neg_view(grad.neg())


def shared(grad):
    """A clone that takes memory of its own when it is written to, or its address asked for."""
    return torch._lazy_clone(grad)


def strided(grad):
    return torch.stack([grad, grad], dim=1)[:, 0]


def of_a_class(grad):
    return grad.as_subclass(Sub)


def expanded(grad):
    return grad[:1].expand_as(grad)


STRANGE = [negated, shared, strided, of_a_class, expanded]


@needs_a_glance
@pytest.mark.parametrize("strange", STRANGE)
def test_a_strange_grad(strange, target):
    """After a step that was seen, and before another."""
    weights = []
    for make in (strange, lambda grad: strange(grad).as_subclass(torch.Tensor).resolve_neg().clone().contiguous()):
        params, optimizer = made(sizes=(4, 6), device=target.device)
        for seed in range(5):
            put_grads(params, seed)
            if seed == 3:
                params[1].grad = make(params[1].grad)
            optimizer.step()
        weights.append(torch.cat([param.detach() for param in params]))
    assert same_bits(*weights)


@needs_a_glance
@pytest.mark.parametrize(
    ("strange", "after"),
    [(negated, [SEEN]), (of_a_class, [SEEN]), (strided, [IN_VAIN, BY_LISTS]), (expanded, [IN_VAIN, BY_LISTS])],
)
def test_it_goes_by_lists(strange, after, calls):
    """And so does the step after one that had to borrow memory."""
    params, optimizer = made(sizes=(4, 6))
    for seed in range(5):
        put_grads(params, seed)
        if seed == 3:
            params[1].grad = strange(params[1].grad)
        optimizer.step()
    assert calls == [BY_LISTS, SEEN, SEEN, BY_LISTS, *after]


@needs_a_glance
def test_states_are_told_apart():
    p, q, first, second = (torch.ones(1) for _ in range(4))
    assert _glance.holds({p: {"a": first}, q: {"b": second}}, [p, first, q, second])
    assert _glance.holds({p: {"a": first}, "user": "theirs", q: {"b": second}}, [p, first, q, second])
    assert _glance.holds({}, [])
    for states, known in (
        ({p: {"a": first}}, [p, second]),
        ({p: {"a": first, "b": second}}, [p, first]),
        ({p: {"a": first}}, [p, first, second]),
        ({p: {"a": first}}, [p, first, q]),
        ({p: {"a": first}, q: {"b": second}}, [p, second, q, first]),
        ({p: {"a": first}, q: {"b": second}}, [q, first, p, second]),
    ):
        assert not _glance.holds(states, known)


def test_without_the_library_python_looks_for_itself(monkeypatch):
    monkeypatch.setattr(_glance, "_functions", _glance._Functions)
    assert not _glance.can_see()
    assert _glance.describer() is None
    test_states_are_told_apart()
    params, optimizer = made()
    for seed in range(3):
        put_grads(params, seed)
        optimizer.step()
    assert optimizer.state[params[0]]["step"] == 3


@needs_a_glance
def test_a_torch_that_shows_nothing(monkeypatch):
    """As older ones, or with an interface of a later, unknown version."""
    unknown = (ctypes.c_uint32 * 32)(2)
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    of_version_2 = make(ctypes.addressof(unknown), b"dlpack_exchange_api", None)
    of_another_name = make(ctypes.addressof(unknown), b"another", None)
    for capsule in (None, of_version_2, of_another_name):
        monkeypatch.setattr(torch.Tensor, "__dlpack_c_exchange_api__", capsule)
        assert _glance._functions.__wrapped__()[1:] == (None, None, None)


@needs_a_glance
def test_nothing_is_held_or_lost():
    params, optimizer = made(sizes=(4, 6))
    put_grads(params, 0)
    kept = [*params, *(param.grad for param in params), torch.Tensor, Parameter]
    optimizer.step()
    optimizer.step()
    before = [sys.getrefcount(each) for each in kept]
    for _ in range(50):
        optimizer.step()
    params[1].grad = negated(params[1].grad)
    for _ in range(50):
        optimizer.step()
    after = [sys.getrefcount(each) for each in kept]
    assert after[:3] == before[:3]
    assert after[3] == before[3] - 1  # the parameter's own
    assert all(abs(a - b) < 20 for a, b in zip(after[4:], before[4:], strict=True))


@needs_a_glance
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_error_on_the_way_is_not_left_behind(device):
    """Memory that torch won't show."""
    param = Parameter(torch.ones(6, device=device))
    param.grad = torch.ones_like(param) if device == "meta" else torch.ones(6).to_sparse()
    seen = torch.empty(_glance.WORDS, dtype=torch.int64)
    assert not _glance.at([param], [param], [param], [None], seen)
    torch.ones(1).sum()  # a pending exception would turn up here
    param = Parameter(torch.ones(6))
    param.grad = torch.ones(6)
    assert _glance.at([param], [param], [param], [None], seen)
    assert not _glance.at([param], [], [param], [None], seen)
    assert not _glance.at([param], [param], [], [None], seen)
    assert not _glance.at([param], [param], [param, param], [None], seen)


@needs_a_glance
def test_modes_hear_of_all_tensors():
    heard = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "adamw_by_plan_" in str(function):
                heard.append(len(args[3]))
            return function(*args, **(kwargs or {}))

    params, optimizer = made(sizes=(4, 6))
    for seed in range(3):
        put_grads(params, seed)
        if seed < 2:
            optimizer.step()
    with Mode():
        optimizer.step()
    assert heard == [2]


@needs_a_glance
def test_what_was_seen_goes_with_the_plan():
    params, optimizer = made(sizes=(4, 6))
    put_grads(params, 0)
    optimizer.step()
    (table,) = optimizer._tables
    shared = *table._hyperparameters(), None, None, None, 1.0, None, None, None, False
    with pytest.raises(RuntimeError, match="seen does not go with the plan"):
        op.by_plan.on("cpu")(table._handle, table._seen[: _glance.WORDS], params[:1], [], *shared)


@needs_a_glance
def test_a_parameter_of_a_class_of_its_own_goes_by_lists(calls):
    params, optimizer = made(sizes=(4, 6))
    for seed in range(4):
        put_grads(params, seed)
        if seed == 3:
            params[1].__class__ = SubParameter
        optimizer.step()
    assert calls == [BY_LISTS, SEEN, SEEN, BY_LISTS]


@needs_a_glance
def test_what_python_raises_meanwhile_arrives():
    class Mode(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.Tensor.is_neg:
                raise KeyboardInterrupt
            return function(*args, **(kwargs or {}))

    params, optimizer = made(sizes=(4, 6))
    put_grads(params, 0)
    optimizer.step()
    with Mode(), pytest.raises(KeyboardInterrupt):
        optimizer.step()
    optimizer.step()
    assert optimizer.state[params[0]]["step"] == 2
