"""Each optimizer steps, skips and clips as torch's do; all can do what AdamW can."""

import math

import pytest
import torch

import mpkernels
from tests.hard_grads import same_bits
from tests.networks import B16, F16, assert_close, backward, network, train
from tests.optim.optimizers import (
    OPTIMIZERS,
    all_same_bits,
    assert_same_states,
    each_optimizer,
    each_scaler,
    each_scaler_and_none,
    each_with_masters,
    saved_numbers,
    scaler_of,
    weights,
)
from tests.optim.test_optimizers_refuse import CLASSES, torchs_own


def backwards(models, seed, factor=1.0):
    """Give the first model grads, and the second these times the factor."""
    backward(models[0], seed)
    for a, b in zip(*(it.parameters() for it in models), strict=True):
        b.grad = a.grad * factor


def assert_same_steps(models, optimizers, steps, lr):
    for step in range(1, steps + 1):
        backwards(models, step)
        for optimizer in optimizers:
            optimizer.step()
        assert_close(*models, 4 * step, lr)


@pytest.mark.kernels("reference", "native")  # the others have their bits
@each_optimizer
def test_it_steps_as_plain_torch_does(target, line):
    ours, theirs = network(device=target.device), network(device=target.device)
    optimizer, reference = line.ours(ours.parameters()), line.theirs(theirs.parameters())
    assert_same_steps((theirs, ours), (reference, optimizer), 3 if target.is_interpreted else 29, line.rounded)


INPUTS = [pytest.param(*it, case, id=f"{it[0].__name__}, {case.desc}") for it in CLASSES for case in torchs_own(it[0])]


@pytest.mark.parametrize(("kind", "twin", "case"), INPUTS)
def test_the_inputs_of_torchs_own_tests_step_as_torchs_do(kind, twin, case):
    ours, theirs = network(), network()
    optimizer = kind(ours.parameters(), **case.kwargs)
    reference = twin(theirs.parameters(), **case.kwargs, foreach=False)
    assert_same_steps((theirs, ours), (reference, optimizer), 11, float(case.kwargs.get("lr", 1e-3)))


@pytest.mark.exhaustive
@pytest.mark.each_value_once
@each_optimizer
@pytest.mark.parametrize("state_dtype", [torch.float32, B16, torch.int8], ids=str)
@pytest.mark.parametrize("master", ["split", "fp32"])
@pytest.mark.parametrize("dtype", [B16, F16], ids=str)
def test_16_bit_parameters_learn_what_fp32_ones_learn(line, dtype, master, state_dtype):
    wide, narrow = network(), network(dtype)
    with torch.no_grad():
        for a, b in zip(wide.parameters(), narrow.parameters(), strict=True):
            a.copy_(b)
    line = line._replace(lr=line.lr / 10)
    first = backward(wide, 0)
    want = train(wide, line.theirs(wide.parameters()), 300)
    got = train(narrow, line.ours(narrow.parameters(), master=master, state_dtype=state_dtype), 300)
    assert abs(got - want) < 0.15 * (first - want)


@each_with_masters
@each_scaler_and_none
@pytest.mark.parametrize("dtype", [torch.float32, F16, B16], ids=str)
@pytest.mark.parametrize("after", [0, 3])
def test_a_skipped_step_leaves_no_trace(line, whose, dtype, after):
    """16-bit parameters have the guard by themselves."""
    model, scaler = network(dtype), scaler_of(whose, init_scale=8.0)
    options = {"max_norm": 1.0} if after else {"guard": True if dtype == torch.float32 else None}
    optimizer = line.ours(model.parameters(), **options)

    def step(seed, bad=1.0):
        backward(model, seed, scaler.scale(torch.ones(())).item())
        next(model.parameters()).grad.view(-1)[0] *= bad
        scaler.step(optimizer)
        scaler.update()

    for seed in range(after):
        step(seed)
    before, states = weights(model), saved_numbers(optimizer)
    step(5, bad=math.inf if after else math.nan)
    assert all_same_bits(before, weights(model))
    if after:
        assert_same_states(saved_numbers(optimizer), states)
    assert scaler.get_scale() == (4.0 if scaler.is_enabled() else 1.0)
    assert same_bits(optimizer.step_was_skipped, torch.tensor(True))
    step(6)
    assert not all_same_bits(before, weights(model))
    assert optimizer.skipped_steps == 1
    assert same_bits(optimizer.step_was_skipped, torch.tensor(False))
    assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()


@each_with_masters
@each_scaler
@pytest.mark.parametrize("options", [{}, {"guard": True}, {"max_norm": 1.0}], ids=str)
def test_an_inf_that_the_scaler_has_found_skips_the_step_though_the_user_removes_it(line, whose, options):
    model = network(B16)
    optimizer, scaler = line.ours(model.parameters(), **options), scaler_of(whose, init_scale=4.0)
    backward(model, 0, scaler.scale(torch.ones(())).item())
    model[0].weight.grad[0, 0] = math.inf
    scaler.unscale_(optimizer)
    model[0].weight.grad.nan_to_num_(posinf=0.0)
    before = weights(model)
    scaler.step(optimizer)
    assert all_same_bits(weights(model), before)
    assert optimizer.skipped_steps == 1


@each_optimizer
@each_scaler
def test_a_scaler_that_rounds_nothing_changes_nothing(line, whose):
    plain, scaled = network(), network()
    optimizers, scaler = [line.ours(it.parameters()) for it in (plain, scaled)], scaler_of(whose, init_scale=16.0)
    scaler.scale(torch.zeros(()))
    for seed in range(4):
        backwards((plain, scaled), seed, 16)
        optimizers[0].step()
        scaler.step(optimizers[1])
        scaler.update()
    assert all_same_bits(weights(plain), weights(scaled))


@each_optimizer
@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_it_clips_as_clip_grad_norm_does(line, max_norm):
    ours, theirs = network(), network()
    optimizer, reference = line.ours(ours.parameters(), max_norm=max_norm), line.theirs(theirs.parameters())
    for steps in range(1, 8):
        backwards((theirs, ours), steps)
        norm = torch.nn.utils.clip_grad_norm_(line.taken(theirs.parameters()), max_norm)
        optimizer.step()
        reference.step()
        torch.testing.assert_close(optimizer.grad_norm, norm, rtol=1e-6, atol=0)
        assert_close(ours, theirs, 4 * steps, line.rounded)


@each_with_masters
@pytest.mark.parametrize(("dtype", "guard"), [(torch.float32, False), (B16, False), (B16, None)], ids=str)
def test_steps_that_release_grads_are_the_same(line, dtype, guard):
    whole, released = network(dtype), network(dtype)
    optimizers = [line.ours(it.parameters(), guard=guard) for it in (whole, released)]
    release = optimizers[1].release_grads()
    for it, optimizer in zip((whole, released), optimizers, strict=True):
        train(it, optimizer, 4)
    assert all(param.grad is None for param in line.taken(released.parameters()))
    release.remove()
    assert all_same_bits(weights(whole), weights(released))


COMPILED = [
    *((name, torch.float32, {}) for name in OPTIMIZERS),
    ("AdamW", torch.float32, {"max_norm": 1.0}),
    ("AdamW", B16, {"state_dtype": torch.int8}),
    ("AdamW", B16, {"offload": True}),  # on the host, which changes nothing
    ("Adam, amsgrad", F16, {}),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "dtype", "options"), COMPILED, ids=str)
def test_step_compiles_without_a_graph_break(name, dtype, options):
    models = network(dtype), network(dtype)
    optimizers = [OPTIMIZERS[name].ours(it.parameters(), **options) for it in models]
    steps = torch.compile(optimizers[0].step, fullgraph=True, backend="aot_eager"), optimizers[1].step
    for seed in range(3):
        for model, step in zip(models, steps, strict=True):
            backward(model, seed)
            step()
    torch.compiler.reset()
    assert all_same_bits(*map(weights, models))


@each_optimizer
def test_a_scheduler_moves_a_tensor_lr_as_it_moves_a_float(line):
    """The betas are tensors, too."""
    models, optimizers = (network(), network()), []
    has_betas = "betas" in line.ours(network().parameters()).defaults
    for model, number in zip(models, (float, torch.tensor), strict=True):
        options = line.options | ({"betas": tuple(map(number, (0.5, 0.875)))} if has_betas else {})
        optimizers.append(line._replace(lr=number(line.lr), options=options).ours(model.parameters()))
    schedulers = [torch.optim.lr_scheduler.StepLR(it, 2, 0.5) for it in optimizers]
    for seed in range(6):
        for model, optimizer, scheduler in zip(models, optimizers, schedulers, strict=True):
            backward(model, seed)
            optimizer.step()
            scheduler.step()
    assert_close(models[1], models[0], 24, line.rounded)


@each_with_masters
def test_hooks_run_around_a_closure_that_is_called_once_and_zero_grad_drops_or_zeroes_the_grads(line):
    model, seen = network(B16), []
    optimizer = line.ours(model.parameters())
    optimizer.register_step_pre_hook(lambda it, *_: seen.append(("before", it is optimizer)))
    optimizer.register_step_post_hook(lambda it, *_: seen.append(("after", it is optimizer)))

    def closure():
        seen.append(torch.is_grad_enabled())
        backward(model, 0)
        return 7.0

    before = weights(model)
    assert optimizer.step(closure) == 7.0
    assert seen == [("before", True), True, ("after", True)]
    assert not all_same_bits(weights(model), before)
    optimizer.zero_grad(set_to_none=False)
    assert not any(param.grad.any() for param in line.taken(model.parameters()))
    optimizer.zero_grad()
    assert all(param.grad is None for param in line.taken(model.parameters()))


@each_optimizer
def test_complex_parameters_step_as_torchs_do(line):
    line.skip_complex()
    ours, theirs = (
        torch.nn.Parameter(torch.randn(5, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)))
        for _ in range(2)
    )
    optimizers = line.ours([ours]), line.theirs([theirs])
    for seed in range(3):
        ours.grad = torch.randn(5, dtype=torch.complex64, generator=torch.Generator().manual_seed(seed))
        theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@each_with_masters
@each_scaler_and_none
def test_an_overflow_report_names_the_parameter_and_the_place(line, whose):
    model, scaler = network(), scaler_of(whose, init_scale=4.0)
    optimizer = line.ours(model.parameters(), guard=None if scaler.is_enabled() else True)
    assert not optimizer.overflow_report()
    backward(model, 0, scaler.scale(torch.ones(())).item())
    model[3].weight.grad[2, 3] = math.nan
    scaler.step(optimizer)
    scaler.update()
    for teller in [optimizer, scaler] if whose == "ours" else [optimizer]:
        report = teller.overflow_report(model)
        [culprit] = report.culprits
        assert (culprit.name, culprit.nans, culprit.first) == ("3.weight", 1, (2, 3))
        assert report.scale == (4.0 if scaler.is_enabled() else None)


@each_with_masters
def test_metrics_read_the_norm_and_the_skips(line):
    model = network()
    optimizer = line.ours(model.parameters(), max_norm=1.0)
    metrics = mpkernels.Metrics(optimizer)
    train(model, optimizer, 2)
    assert metrics.read() == {"grad_norm": optimizer.grad_norm.item(), "skipped_steps": 0.0}
