"""A plan kept from step to step does the same as a new plan for each step, whatever changes in between."""

import copy

import pytest
import torch
from torch.nn import Parameter

from tests.hard_grads import same_bits
from tests.optim.test_plan import params_and_optimizer, put_grads

pytestmark = pytest.mark.kernels("reference", "native", "cuda")  # Triton's kernels get the reference's arguments
SHAPES = (4, 4), (6,), (2,)
I8, B16 = torch.int8, torch.bfloat16


def numbers_of(params, optimizer):
    states = [it for param in params for it in optimizer.state.get(param, {}).values()]
    return [it.detach().clone() for it in (*params, *states)]


def steps(params, optimizer, change, is_kept, change_grads, at):
    for seed in range(6):
        if seed in at:
            change(params, optimizer)
        put_grads(params, seed)
        if seed in at:
            change_grads(params, optimizer)
        if not is_kept:
            optimizer._start_afresh()
        optimizer.step()


def no_change(params, optimizer):
    pass


def assert_the_same(
    device, change=no_change, change_grads=no_change, shapes=SHAPES, at=(2, 4), compared=numbers_of, **options
):
    results = []
    for is_kept in (True, False):
        params, optimizer = params_and_optimizer(shapes=shapes, device=device, **options)
        steps(params, optimizer, change, is_kept, change_grads, at)
        results.append(compared(params, optimizer))
    assert all(map(same_bits, *results))


def elsewhere(params, optimizer):
    for param in params:
        param.data = param.data + 1


def a_longer_parameter(params, optimizer):
    """Make a parameter longer, so that those after it lie in other chunks."""
    params[0].grad, params[0].data = None, torch.ones(20_000)
    for name in ("exp_avg", "exp_avg_sq"):
        optimizer.state[params[0]][name].data = torch.ones(20_000)


def a_new_parameter_in_its_place(params, optimizer):
    params[1] = Parameter(params[1].detach().clone())
    optimizer.param_groups[0]["params"][1] = params[1]


def a_new_parameter_with_the_old_state(params, optimizer):
    state = optimizer.state.pop(params[1])
    a_new_parameter_in_its_place(params, optimizer)
    optimizer.state[params[1]] = state


def a_parameter_added_later(params, optimizer):
    params.append(Parameter(torch.ones(3)))
    optimizer.add_param_group({"params": params[-1:], "lr": 0.5})


def a_parameter_in_another_group(params, optimizer):
    """The order of all parameters stays the same."""
    if len(optimizer.param_groups) == 1:
        optimizer.add_param_group({"params": [Parameter(torch.ones(2))], "lr": 0.5})
    optimizer.param_groups[1]["params"].insert(0, optimizer.param_groups[0]["params"].pop())


def other_tensors_as_states(params, optimizer):
    for state in optimizer.state.values():
        state.update({key: value.clone() for key, value in state.items()})


def states_exchanged(params, optimizer):
    """Exchange states, in the optimizer's order."""
    params[2].data = params[2].data.new_ones(6)
    for name in ("exp_avg", "exp_avg_sq"):
        optimizer.state[params[2]][name].data = torch.ones(6)
    first, second, third = list(optimizer.state.values())
    optimizer.state.clear()
    optimizer.state.update(zip(params, (first, third, second), strict=True))


def moments_in_another_layout_in_place(params, optimizer):
    for name in ("exp_avg", "exp_avg_sq"):
        moment = optimizer.state[params[0]][name]
        moment.set_(moment.untyped_storage(), 0, (4, 4), (1, 4))


def amsgrad_begins(params, optimizer):
    optimizer.param_groups[0]["amsgrad"] = True
    for param in params:
        optimizer.state[param]["max_exp_avg_sq"] = torch.full_like(param, 3)


HYPERS = {"lr": 0.1, "betas": (0.5, 0.6), "eps": 0.1, "weight_decay": 0.5, "maximize": True}
CHANGES = {  # what is done with a list of the parameters and the optimizer
    "parameters in other memory": elsewhere,
    "another layout": lambda it, _: setattr(it[0], "data", it[0].data.t().contiguous().t()),
    "another layout in place": lambda it, _: setattr(it[0], "data", it[0].data.t()),
    "a longer parameter": a_longer_parameter,
    "a swapped parameter": lambda it, _: torch.utils.swap_tensors(it[0], Parameter(it[0].detach() * 2)),
    "a new parameter in its place": a_new_parameter_in_its_place,
    "a new parameter with the old state": a_new_parameter_with_the_old_state,
    "a parameter added later": a_parameter_added_later,
    "one without a grad comes first": lambda _, it: it.param_groups[0]["params"].insert(0, Parameter(torch.ones(2))),
    "parameters in reverse order": lambda _, it: it.param_groups[0]["params"].reverse(),
    "a parameter in another group": a_parameter_in_another_group,
    "another group in its place": lambda _, it: it.param_groups.__setitem__(0, it.param_groups[0] | {"lr": 0.0}),
    "other hyperparameters": lambda _, it: it.param_groups[0].update(HYPERS),
    "other tensors as states": other_tensors_as_states,
    "other memory of a state": lambda it, by: setattr(by.state[it[1]]["exp_avg"], "data", torch.full_like(it[1], 2)),
    "another dict of states": lambda it, by: by.state.update(
        {it[1]: {key: value * 0 + 1 for key, value in by.state[it[1]].items()}}
    ),
    "states exchanged": states_exchanged,
    "states forgotten": lambda _, it: it.state.clear(),
    "the last state forgotten": lambda it, by: by.state.pop(it[-1]),
    "the last state emptied": lambda it, by: by.state[it[-1]].clear(),
    "moments in another layout in place": moments_in_another_layout_in_place,
    "a checkpoint is loaded": lambda _, it: it.load_state_dict(copy.deepcopy(it.state_dict())),
    "amsgrad begins": amsgrad_begins,
}


def a_grad_of_another_dtype(params, optimizer):
    params[1].grad, params[1].grad_dtype = None, None
    params[1].grad = torch.full(params[1].shape, 0.5, dtype=B16)


CHANGES_OF_GRADS = {
    "no grad": lambda it, _: setattr(it[0], "grad", None),
    "a grad of another dtype": a_grad_of_another_dtype,
    "a zero tensor": lambda it, _: setattr(it[0], "grad", torch._efficientzerotensor(it[0].shape, device=it[0].device)),
    "a grad in another layout": lambda it, _: setattr(it[0], "grad", it[0].grad.t()),
}


@pytest.mark.each_value_once
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_kept_plan_sees_a_change(change, target):
    with target.device:  # where the changes make their tensors
        assert_the_same(target.device, change)


@pytest.mark.parametrize("change", CHANGES_OF_GRADS.values(), ids=CHANGES_OF_GRADS)
def test_a_kept_plan_sees_other_grads(change, target):
    with target.device:
        assert_the_same(target.device, change_grads=change)


@pytest.mark.parametrize("dtype", [torch.float32, B16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("options", [{}, {"max_norm": 1.0}, {"amsgrad": True}, {"state_dtype": I8}], ids=str)
def test_a_kept_plan_steps_alike_for_any_dtype_and_options(target, dtype, options):
    assert_the_same(target.device, change_grads=CHANGES_OF_GRADS["no grad"], dtype=dtype, **options)


@pytest.mark.parametrize("key", ["step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "remainder", "master", "scales"])
def test_other_memory_of_one_kind_of_state_is_seen(target, key):
    """The same tensors get other memory; the numbers at the old place are wrong."""
    options = {"amsgrad": True, "master": "fp32" if key == "master" else "split"}
    options["state_dtype"] = I8 if key == "scales" else torch.float32
    old = []

    def elsewhere(params, optimizer):
        for state in optimizer.state.values():
            old.append(state[key].data)
            state[key].data = old[-1].clone()
            old[-1].fill_(77)

    assert_the_same(target.device, elsewhere, dtype=B16, **options)


def test_states_given_to_other_parameters_are_seen():
    """The dict's values come in the same order as before."""

    def exchanged(params, optimizer):
        states = list(optimizer.state.values())
        optimizer.state.clear()
        optimizer.state.update(zip(reversed(params), states, strict=True))

    assert_the_same("cpu", exchanged, shapes=[(4, 4)] * 2)


@pytest.mark.parametrize("place", [0, 299])
def test_a_change_is_seen_among_many(place):
    def other_memory(params, optimizer):
        moment = optimizer.state[params[place]]["exp_avg"]
        moment.data = torch.full_like(moment, 2)

    assert_the_same("cpu", other_memory, shapes=[(2,)] * 300)


def test_a_parameter_of_another_dtype_at_the_same_place_is_seen(target):
    """The second parameter turns from fp16 to bf16 and back; its grads are fp32 from the first change on."""

    def turned(params, optimizer):
        param = params[1]
        param.grad, param.grad_dtype = None, torch.float32
        param.data = param.data.view(B16 if param.dtype == torch.float16 else torch.float16)

    assert_the_same(target.device, turned, dtype=torch.float16)


def test_moments_of_another_dtype_at_the_same_place_are_seen(target):
    """A new plan gives the moments their own dtype again for the next step, so only parameters are compared."""

    def turned(params, optimizer):
        for name in ("exp_avg", "exp_avg_sq"):
            moment = optimizer.state[params[0]][name]
            moment.data = moment.flatten().view(B16)[:16].view(4, 4)

    assert_the_same(target.device, turned, at=(5,), compared=lambda params, _: [param.detach() for param in params])
