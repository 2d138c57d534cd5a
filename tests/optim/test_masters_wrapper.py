"""An optimizer inside Masters steps 16-bit parameters as it would step fp32 ones, for each optimizer of wrapped.py."""

import copy
import math
from operator import attrgetter

import pytest
import torch

from mpkernels import ops
from mpkernels.ops.step.split import split
from mpkernels.optim import Masters
from mpkernels.optim.masters import true_weight
from tests.hard_grads import same_bits
from tests.networks import B16, F16, backward, network
from tests.optim.optimizers import each_scaler_and_none, scaler_of
from tests.optim.test_masters_wrapper_memory import CountingSteps
from tests.optim.wrapped import OPTIMIZERS, all_params, give_grads, groups, parameters

F32 = torch.float32
each_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
each_dtype = pytest.mark.parametrize("dtype", [B16, F16], ids=str)


def pair(make, dtype, **options):
    """Return an optimizer of 16-bit parameters in Masters, and a bare one of fp32 parameters with the same values."""
    ours, bare = Masters(make(groups(parameters(dtype))), **options), make(groups(parameters(F32)))
    for param in (all_params(ours)[1], all_params(bare)[1]):
        param.width = 2.0
    return ours, bare


def true_weights(optimizer):
    return [true_weight(param, optimizer.state.get(param, {})) for param in all_params(optimizer)]


def state_without_remainder(optimizer, param):
    return {key: it for key, it in optimizer.state.get(param, {}).items() if key != "remainder"}


def assert_same(some, others):
    """Assert equal bits, also of tensors in lists and dicts."""
    assert type(some) is type(others)
    if isinstance(some, torch.Tensor):
        assert some.dtype == others.dtype
        assert same_bits(some, others)
    elif isinstance(some, dict):
        assert some.keys() == others.keys()
        for key in some:
            assert_same(some[key], others[key])
    elif isinstance(some, list | tuple):
        assert len(some) == len(others)
        for one, other in zip(some, others, strict=True):
            assert_same(one, other)
    else:
        assert some == others


def assert_in_step(ours, bare):
    """Assert that weights, states and groups agree. A split master of fp16 can't hold each fp32 weight: the bare
    optimizer goes on from what it holds."""
    for param, other in zip(all_params(ours), all_params(bare), strict=True):
        if param.dtype == F32:
            assert same_bits(param, other)
        elif "remainder" in ours.state[param]:
            weight, remainder = split(other.detach(), param.dtype)
            assert same_bits(param, weight)
            assert same_bits(ours.state[param]["remainder"], remainder)
        assert_same(state_without_remainder(ours, param), state_without_remainder(bare, other))
        other.data.copy_(true_weight(param, ours.state[param]))
    for group, other in zip(ours.param_groups, bare.param_groups, strict=True):
        assert_same({**group, "params": None}, {**other, "params": None})


def both_step(ours, bare, seed, dtype, **options):
    for optimizer in (ours, bare):
        give_grads(all_params(optimizer), seed, dtype, **options)
        optimizer.step()


def test_all_of_torchs_optimizers_are_tried():
    kinds = {it for it in vars(torch.optim).values() if isinstance(it, type) and issubclass(it, torch.optim.Optimizer)}
    tried = {getattr(make, "func", make) for make in OPTIMIZERS.values()}
    elsewhere = {torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam}  # test_masters_wrapper_refusals.py
    assert kinds == (tried & kinds) | elsewhere


@each_optimizer
@each_dtype
def test_a_step_equals_the_bare_optimizers_over_fp32_weights_and_grads(make, dtype):
    ours, bare = pair(make, dtype)
    for seed in range(4):
        both_step(ours, bare, seed, dtype, leave_out=[1] if seed < 2 else [])
        assert_in_step(ours, bare)
    assert {param.dtype for param in all_params(ours)} == {dtype, F32}
    assert all(param.grad.dtype == param.dtype for param in all_params(ours))


def snapshot(optimizer):
    return copy.deepcopy(([it.detach() for it in all_params(optimizer)], optimizer.state_dict()))


@each_optimizer
@each_dtype
@each_scaler_and_none
@pytest.mark.parametrize("max_norm", [None, 2.0])
def test_a_step_unscales_clips_and_skips_and_only_reads_the_grads(make, dtype, whose, max_norm):
    ours, bare = pair(make, dtype, max_norm=max_norm)
    scaler = scaler_of(whose, init_scale=4.0, growth_interval=1)
    read = all_params(ours)[: None if max_norm else 3]  # else an fp32 parameter's own grad goes to the class
    for seed, bad in enumerate((math.inf, 1.0, math.nan, 1.0, 1.0)):
        scale, before = scaler.scale(torch.ones(())).item(), snapshot(ours)
        give_grads(all_params(ours), seed, dtype, scale=scale)
        all_params(ours)[2].grad[1, 1] *= bad
        grads = [param.grad.clone() for param in read]
        scaler.step(ours)
        scaler.update()
        assert_same([param.grad for param in read], grads)
        assert same_bits(ours.step_was_skipped, torch.tensor(bad != 1))
        if bad != 1:
            assert_same(snapshot(ours), before)
            continue
        give_grads(all_params(bare), seed, dtype)
        norm = ops.grad_stats([param.grad for param in all_params(bare)]).total_sumsq.sqrt()
        for param in all_params(bare):
            param.grad *= 1.0 if max_norm is None else float(max_norm / (norm + 1e-6))
        bare.step()
        assert_in_step(ours, bare)
        if whose == "torch's" and max_norm is None:  # it looks at the grads itself
            assert ours.grad_norm is None
        else:
            assert same_bits(ours.grad_norm, norm.float())
    assert ours.skipped_steps == 2
    assert not scaler.is_enabled() or scaler.get_scale() == 8.0


@each_optimizer
@each_dtype
@pytest.mark.parametrize("model_first", [True, False])
def test_training_from_a_checkpoint_goes_on_unchanged(make, dtype, model_first):
    ours, bare = pair(make, dtype)
    for seed in range(2):
        both_step(ours, bare, seed, dtype, leave_out=[1])
        assert_in_step(ours, bare)
    weights, saved = snapshot(ours)
    resumed, _ = pair(make, dtype)
    steps = [lambda: resumed.load_state_dict(saved), lambda: put(all_params(resumed), weights)]
    for step in reversed(steps) if model_first else steps:
        step()
    assert_same(true_weights(resumed), true_weights(ours))
    for seed in range(2, 4):
        both_step(resumed, bare, seed, dtype)
        assert_in_step(resumed, bare)


@torch.no_grad()
def put(params, values):
    for param, value in zip(params, values, strict=True):
        param.copy_(value)


@each_optimizer
def test_a_checkpoint_of_the_bare_optimizer_loads_without_rounding(make):
    ours, bare = pair(make, B16)
    for seed in range(2):
        both_step(ours, bare, seed, B16)
    resumed, _ = pair(make, B16)
    put(all_params(resumed), true_weights(ours))  # rounded
    resumed.load_state_dict(copy.deepcopy(bare.state_dict()))
    put(all_params(bare), all_params(resumed))
    for seed in range(2, 4):
        both_step(resumed, bare, seed, B16)
        assert_in_step(resumed, bare)


@each_optimizer
def test_the_bare_optimizer_loads_a_checkpoint_of_masters(make):
    """The bare optimizer of fp32 weights goes on with the same bits; remainders stay in its states, unused."""
    ours, bare = pair(make, B16)
    for seed in range(2):
        both_step(ours, bare, seed, B16)
    _, resumed = pair(make, B16)
    resumed.load_state_dict(copy.deepcopy(ours.state_dict()))
    put(all_params(resumed), true_weights(ours))
    for seed in range(2, 4):
        both_step(resumed, bare, seed, B16)
    assert_same([it.detach() for it in all_params(resumed)], [it.detach() for it in all_params(bare)])


def test_fp32_grads_of_16_bit_weights_are_only_read():
    param = torch.nn.Parameter(torch.ones(8, dtype=B16))
    param.grad_dtype = F32
    param.grad = torch.full((8,), 3.0)
    Masters(torch.optim.SGD([param], lr=0.1), max_norm=0.5).step()
    assert param.grad.eq(3.0).all()


IS_TRAINED = attrgetter("requires_grad")
RELEASED = {name: make for name, make in OPTIMIZERS.items() if "counts in groups" not in name}


@pytest.mark.parametrize("make", RELEASED.values(), ids=RELEASED)
@pytest.mark.parametrize("dtype", [torch.float32, B16], ids=str)
def test_grads_are_freed_in_the_backward_and_weights_step_as_without(make, dtype):
    models = network(dtype), network(dtype)
    for model in models:
        for param in model.parameters():
            param.requires_grad_(param.ndim == 2)  # for Muon
    released, plain = (Masters(make(filter(IS_TRAINED, it.parameters())), guard=False) for it in models)
    release = released.release_grads()
    for step in range(3):
        for model in models:
            backward(model, step)
        assert all(it.grad is None for it in models[0].parameters())
        released.step()
        plain.step()
        plain.zero_grad()
        assert all(map(same_bits, models[0].parameters(), models[1].parameters()))
    release.remove()
    backward(models[0], 3)
    assert all(it.grad is not None for it in models[0].parameters() if it.requires_grad)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda it: CountingSteps(it, lr=0.1), "whose step changes steps, a group's lr"),
        (OPTIMIZERS["a class that counts in groups"], "whose step changes a group's count"),
    ],
)
def test_a_class_that_counts_its_steps_is_not_stepped_in_the_backward(make, what):
    model = network(B16)
    with pytest.raises(ValueError, match=f"^Masters: optimizer must remember its steps in state alone for.*{what}"):
        Masters(make(model.parameters()), guard=False).release_grads()
    optimizer = Masters(make(model.parameters()), max_norm=1.0)  # all grads are kept until the step
    optimizer.release_grads()
    backward(model, 0)
    assert all(it.grad.dtype == B16 for it in model.parameters())
    optimizer.step()
    assert all(it.grad is None for it in model.parameters())
