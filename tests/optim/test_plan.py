"""A plan is kept from step to step, ends with its optimizer, and its steps are seen by autograd and modes."""

import gc

import pytest
import torch
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

import mpkernels
from mpkernels.ops.step.rules.adamw import adamw_ as op
from mpkernels.optim import AdamW
from mpkernels.optim.param_state import create
from mpkernels.optim.plan import Plan
from mpkernels.optim.step_plan import Verdict
from tests.hard_grads import same_bits
from tests.networks import backward, network

SIZES = (5, 3, 700, 1)


def params_and_optimizer(dtype=torch.float32, sizes=SIZES, device="cpu", shapes=None, **options):
    shapes = [(size,) for size in sizes] if shapes is None else shapes
    params = [Parameter(it.to(device, dtype)) for it in random_tensors(0, shapes)]
    return params, AdamW(params, lr=0.1, **options)


def put_grads(params, seed):
    for param, grad in zip(params, random_tensors(seed, [param.shape for param in params]), strict=True):
        param.grad = grad.to(param.device, param.grad_dtype or param.dtype)


def random_tensors(seed, shapes):
    """Return random numbers that are the same on each machine and default device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return [torch.randn(shape, generator=generator, device="cpu") for shape in shapes]


def test_a_plan_is_kept_while_the_same_parameters_have_grads():
    """A step in which one parameter lacks a grad makes another plan, and so does the step after it."""
    params, optimizer = params_and_optimizer(sizes=(4, 6))
    numbers = []
    for seed in range(5):
        put_grads(params, seed)
        if seed == 3:
            params[0].grad = None
        optimizer.step()
        numbers.append(optimizer._plans[0]._native.number)
    first, second, third, without, again = numbers
    assert first == second == third
    assert len({third, without, again}) == 3


class Subclass(torch.Tensor):
    pass


def negated(grad):
    """Return a lazily negated tensor, whose memory holds the negatives."""
    return torch._neg_view(grad.neg())


def shared(grad):
    """Return a clone that gets its own memory when somebody writes to it or asks for its address."""
    return torch._lazy_clone(grad)


def strided(grad):
    return torch.stack([grad, grad], dim=1)[:, 0]


def of_a_subclass(grad):
    return grad.as_subclass(Subclass)


def expanded(grad):
    return grad[:1].expand_as(grad)


STRANGE = [negated, shared, strided, of_a_subclass, expanded]


@pytest.mark.parametrize("strange", STRANGE)
def test_a_strange_grad_steps_as_a_plain_copy_of_it(strange, target):
    weights = []
    for make in (strange, lambda grad: strange(grad).as_subclass(torch.Tensor).resolve_neg().clone().contiguous()):
        params, optimizer = params_and_optimizer(sizes=(4, 6), device=target.device)
        for seed in range(5):
            put_grads(params, seed)
            if seed == 3:
                params[1].grad = make(params[1].grad)
            optimizer.step()
        weights.append(torch.cat([param.detach() for param in params]))
    assert same_bits(*weights)


def test_a_plan_without_a_half_in_cpp_does_not_look_and_step_in_one_call(target):
    """A plan for one step alone can't look at grads. It must say so, else a guarded step would go on unguarded."""
    [param], optimizer = params_and_optimizer(sizes=(3,), device=target.device)
    before, [group] = param.detach().clone(), optimizer.param_groups
    plan = Plan(AdamW._rule, [(group, param, create(AdamW._rule, param, group))], [0], is_for_once=True)
    assert not plan.look_and_step([torch.ones_like(param)], Verdict(has_norm=True), None, None)
    assert same_bits(param, before)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64], ids=str)
def test_a_step_goes_on_from_a_count_that_is_set_by_hand(target, dtype):
    [param], optimizer = params_and_optimizer(sizes=(2,), device=target.device)
    for expected in (1, 6):
        put_grads([param], 0)
        optimizer.step()
        assert optimizer.state[param]["step"].item() == expected
        optimizer.state[param]["step"] = torch.tensor(5, dtype=dtype, device=target.device)


def test_a_dispatch_mode_is_shown_all_parameters_and_grads():
    calls = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "adamw_by_plan_" in str(function):
                calls.append((len(args[1]), len(args[2])))
            return function(*args, **(kwargs or {}))

    params, optimizer = params_and_optimizer(sizes=(4, 6))
    put_grads(params, 0)
    optimizer.step()
    with Mode():
        optimizer.step()
    assert calls == [(2, 2)]


@pytest.mark.parametrize("number", [0, -1, 123_456_789])
def test_an_unknown_plan_number_is_refused(number):
    params, optimizer = params_and_optimizer(sizes=(4, 6))
    put_grads(params, 0)
    optimizer.step()
    [plan] = optimizer._plans
    arguments = *plan._shared(Verdict(), None, None), False
    torch.ops.mpkernels.adamw_forget(number)  # does nothing
    with pytest.raises(RuntimeError, match=f"there is no plan {number}"):
        op.by_plan.on(torch.device("cpu"))(number, params, [param.grad for param in params], *arguments)
    optimizer.step()


def test_neighbouring_parameters_may_be_at_different_steps(target):
    weights = []
    for apart in (True, False):
        params, optimizer = params_and_optimizer(sizes=(4, 6, 2), device=target.device)
        optimizers = [AdamW([param], lr=0.1) for param in params] if apart else [optimizer]
        for seed in range(5):
            put_grads(params, seed)
            if seed in (1, 2):
                params[1].grad = None
            for each in optimizers:
                each.step()
        weights.append(torch.cat([param.detach() for param in params]))
    assert same_bits(*weights)


def test_a_step_raises_the_version_of_each_parameter(target):
    params, optimizer = params_and_optimizer(sizes=(4, 6), device=target.device)
    for seed in range(3):
        put_grads(params, seed)
        before = [param._version for param in params]
        optimizer.step()
        assert all(param._version > version for param, version in zip(params, before, strict=True))


def test_a_plan_made_within_a_transform_outlives_it():
    params, optimizer = params_and_optimizer(sizes=(4, 6))
    put_grads(params, 0)

    def stepping(x):
        optimizer.step()
        return x.sum()

    torch.func.grad(stepping)(torch.ones(2))
    optimizer.step()
    optimizer.step()
    assert optimizer.state[params[0]]["step"] == 3


def test_a_plan_may_end_within_a_transform():
    """Python may collect garbage within a transform. If a finalizer then raises, pytest reports it."""
    params, optimizer = params_and_optimizer(sizes=(4, 6))
    put_grads(params, 0)
    optimizer.step()
    end = optimizer._plans[0]._native.end

    def collecting(x):
        optimizer._start_afresh()
        gc.collect()
        return x + 1

    assert end.alive
    torch.func.functionalize(collecting)(torch.ones(2))
    assert not end.alive


def test_a_kernel_may_be_forced_between_steps():
    weights = []
    for kernels in (("native",) * 4, ("native", "reference", "native", "reference")):
        params, optimizer = params_and_optimizer(sizes=(4, 6))
        for seed, kernel in enumerate(kernels):
            put_grads(params, seed)
            with mpkernels.backend(kernel):
                optimizer.step()
        weights.append(torch.cat([param.detach() for param in params]))
    assert same_bits(*weights)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_amsgrad_may_end(backend):
    """The scales of the moment that is no longer used stay where they are."""
    with mpkernels.backend(backend):
        model, plain = network(), network()
        optimizer = AdamW(model.parameters(), amsgrad=True, state_dtype=torch.int8)
        reference = AdamW(plain.parameters(), state_dtype=torch.int8)
        optimizer.param_groups[0]["amsgrad"] = True
        for seed in range(3):
            for each, its_optimizer in ((model, optimizer), (plain, reference)):
                backward(each, seed)
                its_optimizer.step()
            optimizer.param_groups[0]["amsgrad"] = False
        assert all(map(same_bits, model.parameters(), plain.parameters()))


@pytest.mark.parametrize("after", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("before", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_amsgrad_may_begin(before, after):
    """It may begin together with another state_dtype. At its first step max_exp_avg_sq is the new exp_avg_sq."""
    model, plain = network(), network()
    optimizer, reference = (AdamW(it.parameters(), state_dtype=before) for it in (model, plain))
    for seed in range(2):
        for each, its_optimizer in ((model, optimizer), (plain, reference)):
            backward(each, seed)
            its_optimizer.step()
            its_optimizer.param_groups[0]["state_dtype"] = after
        optimizer.param_groups[0]["amsgrad"] = True
    assert all(map(same_bits, model.parameters(), plain.parameters()))
    for param, twin in zip(model.parameters(), plain.parameters(), strict=True):
        state, wanted = optimizer.state[param], reference.state[twin]
        assert state["exp_avg"].dtype == after
        assert all(same_bits(state[key], wanted[key]) for key in ("exp_avg", "exp_avg_sq"))
        assert same_bits(state["max_exp_avg_sq"], wanted["exp_avg_sq"])


def test_lazy_clones_keep_their_values():
    model = network()
    optimizer = AdamW(model.parameters(), lr=0.1)
    backward(model, 0)
    optimizer.step()
    clones = [torch._lazy_clone(it.detach()) for it in (model[0].weight, optimizer.state[model[0].weight]["exp_avg"])]
    values = [clone.tolist() for clone in clones]
    backward(model, 1)
    optimizer.step()
    assert [clone.tolist() for clone in clones] == values


def test_a_foreign_key_in_the_state_is_kept():
    model = network()
    optimizer = AdamW(model.parameters())
    optimizer.state["note"] = 3
    for seed in range(2):
        backward(model, seed)
        optimizer.step()
    assert optimizer.state["note"] == 3


def test_a_plan_may_end_while_torch_traces():
    model = network()
    optimizer = AdamW(model.parameters())
    backward(model, 0)
    optimizer.step()
    with torch._subclasses.FakeTensorMode():
        del optimizer
        gc.collect()


def test_groups_may_exchange_parameters_while_some_have_no_grad():
    results = []
    for is_kept in (True, False):
        a, n, m, d = (Parameter(torch.full((3,), 2.0)) for _ in range(4))
        optimizer = AdamW([{"params": [a, n]}, {"params": [m, d], "lr": 0.5}], lr=0.1)
        for seed in range(5):
            put_grads([a, d], seed)
            if seed == 3:
                for group, params in zip(optimizer.param_groups, ([n, m], [a, d]), strict=True):
                    group["params"][:] = params
            if not is_kept:
                optimizer._start_afresh()
            optimizer.step()
        results.append(torch.cat([a.detach(), d.detach()]))
    assert same_bits(*results)
