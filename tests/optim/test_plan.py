"""A plan that is kept from step to step does what one does that is made anew for each, whatever changes in between."""

import gc

import pytest
import torch
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from mpkernels.ops.step.rules.adamw import adamw_ as op
from mpkernels.optim import AdamW
from tests.cases import same_bits

SIZES = (5, 3, 700, 1)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def made(dtype=torch.float32, sizes=SIZES, device="cpu", **options):
    params = [Parameter(it.to(device, dtype)) for it in drawn(0, [(size,) for size in sizes])]
    return params, AdamW(params, lr=0.1, **options)


def put_grads(params, seed):
    for param, grad in zip(params, drawn(seed, [param.shape for param in params]), strict=True):
        param.grad = grad.to(param.device, param.dtype)


def drawn(seed, shapes):
    """The same on each machine, whichever device is the default one."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return [torch.randn(shape, generator=generator, device="cpu") for shape in shapes]


def test_what_is_drawn_does_not_depend_on_the_default_device():
    with torch.device("meta"):
        (param,), _ = made(sizes=(4,))
        put_grads([param], 1)
    assert (param.device, param.grad.device) == (torch.device("cpu"), torch.device("cpu"))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("options", [{}, {"max_norm": 1.0}, {"amsgrad": True}, {"state_dtype": torch.int8}], ids=str)
def test_it_does_the_same(target, dtype, options):
    weights = []
    for is_kept in (True, False):
        params, optimizer = made(dtype, device=target.device, **options)
        for seed in range(4):
            put_grads(params, seed)
            params[2].grad = None if seed == 2 else params[2].grad
            if not is_kept:
                optimizer._start_afresh()
            optimizer.step()
        weights.append(torch.cat([param.detach().double() for param in params]))
    assert same_bits(*weights)


def test_it_is_kept():
    """Also where a parameter that had no grad for a step has one again."""
    params, optimizer = made(sizes=(4, 6))
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


@pytest.mark.parametrize("strange", STRANGE)
def test_a_strange_grad(strange, target):
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


def test_modes_hear_of_all_tensors():
    heard = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "adamw_by_plan_" in str(function):
                heard.append((len(args[1]), len(args[2])))
            return function(*args, **(kwargs or {}))

    params, optimizer = made(sizes=(4, 6))
    put_grads(params, 0)
    optimizer.step()
    with Mode():
        optimizer.step()
    assert heard == [(2, 2)]


@pytest.mark.parametrize("number", [0, -1, 123_456_789])
def test_a_plan_that_is_none_is_refused(number):
    params, optimizer = made(sizes=(4, 6))
    put_grads(params, 0)
    optimizer.step()
    [plan] = optimizer._plans
    shared = *plan._hyperparameters(), None, None, None, 1.0, None, None, None, False
    torch.ops.mpkernels.adamw_forget(number)  # no harm
    with pytest.raises(RuntimeError, match=f"there is no plan {number}"):
        op.by_plan.on(torch.device("cpu"))(number, params, [param.grad for param in params], *shared)
    optimizer.step()


def test_neighbours_at_other_steps(target):
    """Whose powers of the betas are their own."""
    weights = []
    for apart in (True, False):
        params, optimizer = made(sizes=(4, 6, 2), device=target.device)
        optimizers = [AdamW([param], lr=0.1) for param in params] if apart else [optimizer]
        for seed in range(5):
            put_grads(params, seed)
            if seed in (1, 2):
                params[1].grad = None
            for each in optimizers:
                each.step()
        weights.append(torch.cat([param.detach() for param in params]))
    assert same_bits(*weights)


def test_autograd_is_told_of_each_parameter(target):
    params, optimizer = made(sizes=(4, 6), device=target.device)
    for seed in range(3):
        put_grads(params, seed)
        before = [param._version for param in params]
        optimizer.step()
        assert all(param._version > version for param, version in zip(params, before, strict=True))


def test_a_plan_made_within_a_transform_outlives_it():
    params, optimizer = made(sizes=(4, 6))
    put_grads(params, 0)

    def stepping(x):
        optimizer.step()
        return x.sum()

    torch.func.grad(stepping)(torch.ones(2))
    optimizer.step()
    optimizer.step()
    assert optimizer.state[params[0]]["step"] == 3


def test_a_plan_ends_with_its_optimizer_also_within_a_transform():
    """Garbage is collected at any time; what a finalizer raises, pytest tells."""
    params, optimizer = made(sizes=(4, 6))
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
    import mpkernels

    weights = []
    for kernels in (("native",) * 4, ("native", "reference", "native", "reference")):
        params, optimizer = made(sizes=(4, 6))
        for seed, kernel in enumerate(kernels):
            put_grads(params, seed)
            with mpkernels.backend(kernel):
                optimizer.step()
        weights.append(torch.cat([param.detach() for param in params]))
    assert same_bits(*weights)
