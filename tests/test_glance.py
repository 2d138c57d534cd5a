"""A step that goes by a glance at Python's objects does what one does that is handed lists; and what a glance can't see
goes the long way."""

import ctypes
import sys

import pytest
import torch
from torch.nn import Parameter

from mpkernels import _glance
from mpkernels.ops import adamw as op
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
    monkeypatch.setattr("mpkernels._adamw_table.Table._plan_for", plan_once)
    return made_calls


def plan_once(table, by_plan):
    """As _plan_for does, for a call that is spied on anew each time."""
    if table._by_plan is None:
        op.plan.on(table.device.type)(table._handle, *table._lists)
        table._by_plan = by_plan


needs_a_glance = pytest.mark.skipif(not _glance.can_see(), reason="this torch shows nothing of its tensors")
SEEN, BY_LISTS = (True, 0, True), (False, 2, True)


def test_this_torch_can_be_looked_at():
    """Else all of the below would go by lists, and nobody notice; an older one can't."""
    assert _glance.can_see() == hasattr(torch.Tensor, "__dlpack_c_exchange_api__")


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
@pytest.mark.parametrize("strange", [negated, strided, of_a_class, expanded])
def test_it_goes_by_lists(strange, calls):
    params, optimizer = made(sizes=(4, 6))
    for seed in range(5):
        put_grads(params, seed)
        if seed == 3:
            params[1].grad = strange(params[1].grad)
        optimizer.step()
    assert calls == [
        BY_LISTS,
        SEEN,
        SEEN,
        BY_LISTS,
        SEEN if strange in (negated, of_a_class) else (True, 0, False),
        *([] if strange in (negated, of_a_class) else [BY_LISTS]),
    ]


def other_moment(params, optimizer):
    optimizer.state[params[1]]["exp_avg"] = torch.full_like(params[1], 2)


def other_memory(params, optimizer):
    optimizer.state[params[1]]["exp_avg"].data = torch.full_like(params[1], 2)


def other_param_memory(params, optimizer):
    params[1].data = params[1].data + 1


def one_that_comes_later(params, optimizer):
    later = Parameter(torch.ones(3))
    later.grad = torch.ones(3)
    optimizer.add_param_group({"params": [later]})
    params.append(later)


def others_changed_places(params, optimizer):
    optimizer.param_groups[0]["params"].reverse()


def frozen(params, optimizer):
    params[0].grad = None


def one_without_a_grad_comes_first(params, optimizer):
    optimizer.param_groups[0]["params"].insert(0, Parameter(torch.ones(2)))


def a_new_one_in_its_place(params, optimizer):
    old, params[1] = params[1], Parameter(params[1].detach().clone())
    params[1].grad = old.grad
    optimizer.param_groups[0]["params"][1] = params[1]


def forgotten_states(params, optimizer):
    optimizer.state.clear()


def amsgrad_off_and_on(params, optimizer):
    optimizer.param_groups[0]["amsgrad"] = True
    for param in params:
        optimizer.state[param]["max_exp_avg_sq"] = torch.full_like(param, 3)


CHANGES = [
    other_moment,
    other_memory,
    other_param_memory,
    one_that_comes_later,
    others_changed_places,
    frozen,
    one_without_a_grad_comes_first,
    a_new_one_in_its_place,
    forgotten_states,
    amsgrad_off_and_on,
]


@needs_a_glance
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change, monkeypatch):
    """Before the grads come, and after."""
    weights = []
    for sees in (True, False):
        with monkeypatch.context() as patch:
            if not sees:
                patch.setattr(_glance, "can_see", lambda: False)
            params, optimizer = made(sizes=(4, 6, 2))
            for seed in range(6):
                put_grads(params, seed)
                if seed in (2, 4):
                    change(params, optimizer)
                optimizer.step()
            weights.append(torch.cat([param.detach() for param in params]))
    assert same_bits(*weights)


@needs_a_glance
def test_states_are_told_apart():
    first, second = torch.ones(1), torch.ones(1)
    assert _glance.holds({0: {"a": first}, 1: {"b": second}}, [first, second])
    assert _glance.holds({0: {"a": first}, 1: "a user's", 2: {"b": second}}, [first, second])
    assert _glance.holds({}, [])
    for states, known in (
        ({0: {"a": first}}, [second]),
        ({0: {"a": first, "b": second}}, [first]),
        ({0: {"a": first}}, [first, second]),
        ({0: {"a": first}, 1: {"b": second}}, [second, first]),
    ):
        assert not _glance.holds(states, known)


def test_without_the_library_python_looks_for_itself(monkeypatch):
    monkeypatch.setattr(_glance, "_functions", lambda: (None, None))
    assert not _glance.can_see()
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
        assert _glance._functions.__wrapped__()[1] is None


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
    from torch.utils._python_dispatch import TorchDispatchMode

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
