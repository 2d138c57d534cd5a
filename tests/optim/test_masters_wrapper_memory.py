"""Masters around classes that remember parameters, steps or notes of their own: they step as over fp32 parameters, in
one group and in three, or are refused."""

import copy
import re

import pytest
import torch

from mpkernels.optim import Masters
from mpkernels.optim.masters import true_weight
from tests.hard_grads import same_bits
from tests.networks import B16, F16
from tests.optim.wrapped import all_params, fp32_parameter, give_grads, parameters

F32 = torch.float32


class Remembering(torch.optim.Optimizer):
    """SGD with momentum, which is kept in a place of its own."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    def buffer(self, param):
        """Return the parameter's momentum, which this makes if there is none."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.buffer(param).mul_(0.9).add_(param.grad)
                    param.sub_(self.buffer(param), alpha=group["lr"])


class ByTensor(Remembering):
    def __init__(self, params):
        self.buffers = {}
        super().__init__(params)

    def buffer(self, param):
        return self.buffers.setdefault(param, torch.zeros_like(param))

    def state_dict(self):
        return super().state_dict() | {"buffers": [self.buffers[it].clone() for it in all_params(self)]}

    def load_state_dict(self, state_dict):
        super().load_state_dict({key: it for key, it in state_dict.items() if key != "buffers"})
        self.buffers = dict(zip(all_params(self), state_dict["buffers"], strict=True))


class ById(Remembering):
    def __init__(self, params):
        self.buffers = {}
        super().__init__(params)

    def buffer(self, param):
        return self.buffers.setdefault(id(param), torch.zeros_like(param))


class InAListOfAFirstStep(Remembering):
    known = None

    def buffer(self, param):
        self.known = self.known or [(it, torch.zeros_like(it)) for it in all_params(self) if it.grad is not None]
        return next(buffer for it, buffer in self.known if it is param)


class OnParameters(Remembering):
    def buffer(self, param):
        if not hasattr(param, "momentum"):
            param.momentum = torch.zeros_like(param)
        return param.momentum


class OnParametersFromTheStart(OnParameters):
    def __init__(self, params):
        super().__init__(params)
        for param in all_params(self):
            self.buffer(param)


class CountingSteps(torch.optim.SGD):
    steps = 0

    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.steps
        return super().step(closure)


class ReadingGroupsByPlace(torch.optim.SGD):
    def step(self, closure=None):
        for i, _ in enumerate(self.param_groups):
            self.param_groups[i]["lr"] = 0.1 / (i + 1) * self.param_groups[-1]["momentum"]
        return super().step(closure)


REMEMBERING = ByTensor, ById, InAListOfAFirstStep, OnParameters, OnParametersFromTheStart
COUNTING = (lambda it: CountingSteps(it, lr=0.1)), (lambda it: ReadingGroupsByPlace(it, lr=0.1, momentum=0.9))
each_class = pytest.mark.parametrize("make", [*REMEMBERING, *COUNTING])
each_count = pytest.mark.parametrize("count", [1, 3])


def made(make, dtype, count):
    params = parameters(dtype)
    return make([{"params": [*params, fp32_parameter()]}] if count == 1 else [{"params": [it]} for it in params])


def step(optimizer, seed, scale=1.0):
    give_grads(all_params(optimizer), seed, B16, scale)
    optimizer.step()


def assert_same_weights(ours, bare):
    for param, other in zip(all_params(ours), all_params(bare), strict=True):
        assert same_bits(true_weight(param, ours.state[param]).float(), other.detach())


@each_class
@each_count
def test_it_steps_as_over_fp32_parameters(make, count):
    ours, bare = Masters(made(make, B16, count)), made(make, F32, count)
    for seed in range(4):
        step(ours, seed)
        step(bare, seed)
        assert_same_weights(ours, bare)


def test_what_it_keeps_by_tensor_is_saved_and_loaded():
    ours, bare = Masters(made(ByTensor, B16, 3)), made(ByTensor, F32, 3)
    for seed in range(2):
        step(ours, seed)
        step(bare, seed)
    resumed = Masters(made(ByTensor, B16, 3))
    with torch.no_grad():
        for param, other in zip(all_params(resumed), all_params(ours), strict=True):
            param.copy_(other)
    resumed.load_state_dict(copy.deepcopy(ours.state_dict()))
    for seed in range(2, 4):
        step(resumed, seed)
        step(bare, seed)
        assert_same_weights(resumed, bare)


def test_what_is_noted_on_a_parameter_is_there_for_all():
    ours = Masters(made(OnParameters, B16, 1))
    step(ours, 0)
    param = all_params(ours)[0]
    assert param.momentum.dtype == F32
    param.momentum = torch.zeros_like(param.momentum)  # the user's note
    before = true_weight(param, ours.state[param]).clone()
    step(ours, 1)
    assert torch.equal(true_weight(param, ours.state[param]), before - 0.1 * param.grad.float())


def test_weights_take_no_memory_in_fp32_between_steps():
    ours = Masters(made(ById, B16, 3))
    step(ours, 0)
    shown = []
    ours.wrapped.register_step_pre_hook(lambda it, *_: shown.extend(all_params(it)))
    step(ours, 1)
    assert [it.dtype for it in shown] == [F32] * 3
    assert [(it.untyped_storage().nbytes(), it.grad) for it in shown] == [(0, None)] * 3


def test_a_parameter_may_be_in_a_group_twice():
    params = [torch.nn.Parameter(torch.ones(5, dtype=it)) for it in (B16, F32)]
    with pytest.warns(UserWarning, match="duplicate parameters"):
        ours, bare = Masters(torch.optim.SGD([params[0]] * 2, 0.1)), torch.optim.SGD([params[1]] * 2, 0.1)
    for _ in range(3):
        params[0].grad = torch.linspace(-1, 1, 5).to(B16)
        params[1].grad = params[0].grad.float()
        ours.step()
        bare.step()
        assert same_bits(true_weight(params[0], ours.state[params[0]]), params[1].detach())
    assert ours.grad_norm == params[1].grad.norm()  # it counts once


class Holding(torch.optim.SGD):
    """SGD that also keeps something, of which step makes no use."""

    def __init__(self, params, kept):
        super().__init__(params, lr=0.1)
        self.kept = kept


class Box:
    def __init__(self, content):
        self.content = content


def a_model(param):
    model = torch.nn.Module()
    model.inner = torch.nn.Module()
    model.inner.weight = param
    return model


HELD = {
    "a list": lambda param: [param],
    "a dict of tuples": lambda param: {"all": (1, param)},
    "keys": lambda param: {param: 1},
    "ids": lambda param: {id(param)},
    "the data": lambda param: param.data,
    "views": lambda param: [param.detach().view(-1)[1:]],
    "an object": lambda param: Box([param]),
    "a model": a_model,
}


@pytest.mark.parametrize("held", HELD.values(), ids=HELD)
@pytest.mark.parametrize("dtype", [B16, F16], ids=str)
def test_a_class_that_keeps_16_bit_parameters_elsewhere_is_refused(held, dtype):
    params = parameters(dtype)
    with pytest.raises(ValueError, match=r"groups' params alone, got .*Holding, whose kept holds some"):
        Masters(Holding(params, held(params[1])))


def test_a_class_that_keeps_fp32_parameters_is_refused_once_they_have_16_bits():
    params = parameters(F32)
    optimizer = Masters(Holding(params, list(params)))
    step(optimizer, 0)
    params[1].grad = None
    params[1].data = params[1].data.to(B16)
    for refused in (optimizer.step, optimizer.state_dict):
        params[1].grad = torch.ones_like(params[1])
        with pytest.raises(ValueError, match="whose kept holds some"):
            refused()


def test_groups_and_states_that_keep_parameters_are_refused():
    first, second, third = (parameters(B16) for _ in range(3))
    with pytest.raises(ValueError, match="whose param_groups holds some"):
        Masters(torch.optim.SGD([{"params": first, "by_name": {"weight": first[0]}}], lr=0.1))
    sgd = torch.optim.SGD(second, lr=0.1)
    sgd.state[second[0]]["from"] = second[0].data
    with pytest.raises(ValueError, match="whose state holds some"):
        Masters(sgd)
    optimizer = Masters(Holding(third, list(range(3))))
    more = torch.nn.Parameter(torch.ones(3, dtype=B16))
    optimizer.wrapped.kept.append(more)
    with pytest.raises(ValueError, match="whose kept holds some"):
        optimizer.add_param_group({"params": [more]})
    assert len(optimizer.param_groups) == 1


def test_a_class_may_keep_a_groups_list_and_other_tensors():
    params = parameters(B16)
    sgd = Holding(params, [torch.ones(3), 3, "x", {"others": parameters(B16)}])
    sgd.first = sgd.param_groups[0]["params"]
    optimizer, before = Masters(sgd), params[0].detach().clone()
    step(optimizer, 0)
    assert not torch.equal(params[0], before)


@pytest.mark.parametrize("make", [lambda it: torch.optim.Adam(it, lr=0.1), OnParameters])
def test_groups_may_be_stepped_one_by_one(make):
    ours, bare, shown = Masters(made(make, B16, 3), group_by_group=True, max_norm=100.0), made(make, F32, 3), []
    ours.wrapped.register_step_pre_hook(lambda it, *_: shown.append(len(all_params(it))))
    for seed in range(3):
        step(ours, seed)
        step(bare, seed)
        assert_same_weights(ours, bare)
    assert shown == [1] * 9
    assert "group_by_group: True" in repr(ours)
    assert copy.deepcopy(ours).group_by_group


@pytest.mark.parametrize("make", [COUNTING[0], ByTensor, InAListOfAFirstStep])
def test_a_class_that_remembers_steps_is_not_stepped_group_by_group(make):
    optimizer = made(make, B16, 3)
    before = copy.deepcopy(optimizer.state_dict() if make is not ByTensor else None)
    state = torch.random.get_rng_state()
    with pytest.raises(ValueError, match=re.escape("alone for group_by_group=True, got tests.optim")):
        Masters(optimizer, group_by_group=True)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert before == (optimizer.state_dict() if make is not ByTensor else None)
    Masters(optimizer)
