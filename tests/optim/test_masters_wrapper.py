"""An optimizer inside Masters steps 16-bit parameters as it would step fp32 ones, for each optimizer of a table."""

import copy

import pytest
import torch

from mpkernels import ops
from mpkernels.amp import GradScaler
from mpkernels.ops.step.split import split
from mpkernels.optim import Masters
from mpkernels.optim.masters import true_weight
from tests.hard_grads import same_bits
from tests.networks import B16, F16
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


def both_step(ours, bare, seed, dtype, factor=1.0, **options):
    give_grads(all_params(ours), seed, dtype, **options)
    give_grads(all_params(bare), seed, dtype, **options)
    for param in all_params(bare):
        if factor != 1 and param.grad is not None:
            param.grad *= factor
    ours.step()
    bare.step()


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


@each_optimizer
def test_bf16_weights_learn_what_each_step_adds(make):
    """After many steps, with no comparison in between, the true weights are those of the fp32 parameters."""
    ours, bare = pair(make, B16)
    for seed in range(20):
        both_step(ours, bare, seed, B16)
    assert_same([it.float() for it in true_weights(ours)], [it.detach() for it in all_params(bare)])


@each_optimizer
@each_dtype
def test_grads_are_clipped_by_their_common_norm(make, dtype):
    ours, bare = pair(make, dtype, max_norm=2.0)
    for seed in range(3):
        give_grads(all_params(ours), seed, dtype)
        norm = ops.grad_stats([param.grad for param in all_params(ours)]).total_sumsq.sqrt()
        grads = [param.grad.clone() for param in all_params(ours)]
        both_step(ours, bare, seed, dtype, factor=float(2.0 / (norm + 1e-6)))
        assert_in_step(ours, bare)
        assert ours.grad_norm.dtype == F32
        assert ours.grad_norm == norm.float()
        assert_same([param.grad for param in all_params(ours)], grads)


def snapshot(optimizer):
    return copy.deepcopy(([it.detach() for it in all_params(optimizer)], optimizer.state_dict()))


def spoil(optimizer, bad):
    all_params(optimizer)[2].grad[1, 1] = bad


@each_optimizer
@each_dtype
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_skipped_step_leaves_no_trace(make, dtype, bad):
    ours, bare = pair(make, dtype)
    for seed in range(3):
        before = snapshot(ours)
        give_grads(all_params(ours), seed, dtype)
        spoil(ours, bad)
        ours.step()
        assert_same(snapshot(ours), before)
        assert (ours.step_was_skipped.dtype, ours.step_was_skipped.item()) == (torch.bool, True)
        assert ours.skipped_steps == seed + 1
        both_step(ours, bare, seed, dtype)
        assert_in_step(ours, bare)
        assert not ours.step_was_skipped


@each_optimizer
@each_dtype
@pytest.mark.parametrize("scaler", [torch.amp.GradScaler, GradScaler], ids=lambda it: it.__module__)
@pytest.mark.parametrize("max_norm", [None, 2.0])
def test_a_step_under_a_scaler_unscales_and_skips(make, dtype, scaler, max_norm):
    (ours, bare), scaler = pair(make, dtype, max_norm=max_norm), scaler("cpu", init_scale=4.0, growth_interval=1)
    for seed in range(4):
        scale = scaler.scale(torch.ones(())).item()
        give_grads(all_params(ours), seed, dtype, scale=scale)
        if seed == 1:
            spoil(ours, float("inf"))
            before = snapshot(ours)
        scaler.step(ours)
        scaler.update()
        if seed == 1:
            assert_same(snapshot(ours), before)
            assert ours.step_was_skipped
            continue
        give_grads(all_params(bare), seed, dtype)
        norm = float(ops.grad_stats([param.grad for param in all_params(bare)]).total_sumsq.sqrt())
        for param in all_params(bare):
            param.grad *= 1.0 if max_norm is None else max_norm / (norm + 1e-6)
        bare.step()
        assert_in_step(ours, bare)
        is_ours = isinstance(scaler, GradScaler)  # which leaves the look at the grads to the step, with their norm
        assert ours.grad_norm == torch.tensor(norm).float() if is_ours or max_norm else ours.grad_norm is None
    assert ours.skipped_steps == 1
    assert scaler.get_scale() == 4.0 * 2**3 / 2
    assert not {"grad_scale", "found_inf"} & vars(ours).keys()


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
