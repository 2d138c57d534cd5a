"""Each optimizer steps, skips, clips and refuses as torch's do; all can do what AdamW can."""

import pytest
import torch
from torch.testing._internal import common_optimizers

import mpkernels
from mpkernels.optim import SGD, Adam, AdamW
from tests.networks import B16, F16, assert_close, backward, network, train
from tests.optim.optimizers import all_same_bits, assert_same_states, each_optimizer, saved_numbers, weights

SCALERS = {"ours": mpkernels.GradScaler, "torch's": torch.amp.GradScaler}


@pytest.mark.kernels("reference", "native")  # the others have their bits
@each_optimizer
def test_it_steps_as_plain_torch_does(target, line):
    ours, theirs = network(device=target.device), network(device=target.device)
    optimizer, reference = line.ours(ours.parameters()), line.theirs(theirs.parameters())
    for steps in range(1, 4 if target.is_interpreted else 30):
        backward(theirs, seed=steps)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            a.grad = b.grad.clone()
        optimizer.step()
        reference.step()
        assert_close(ours, theirs, 4 * steps, line.lr)


CLASSES = [(AdamW, torch.optim.AdamW), (Adam, torch.optim.Adam), (SGD, torch.optim.SGD)]


def torchs_own(kind, bad=False):
    """Return the inputs that torch's own tests have for a class of this name."""
    if bad:
        return getattr(common_optimizers, f"optim_error_inputs_func_{kind.__name__.lower()}")("cpu", torch.float32)
    return getattr(common_optimizers, f"optim_inputs_func_{kind.__name__.lower()}")("cpu")


INPUTS = [pytest.param(*it, case, id=f"{it[0].__name__}, {case.desc}") for it in CLASSES for case in torchs_own(it[0])]


@pytest.mark.parametrize(("kind", "twin", "case"), INPUTS)
def test_the_inputs_of_torchs_own_tests_step_as_torchs_do(kind, twin, case):
    ours, theirs = network(), network()
    optimizer = kind(ours.parameters(), **case.kwargs)
    reference = twin(theirs.parameters(), **case.kwargs, foreach=False)
    for steps in range(1, 12):
        backward(theirs, seed=steps)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            a.grad = b.grad.clone()
        optimizer.step()
        reference.step()
        assert_close(ours, theirs, 4 * steps, float(case.kwargs.get("lr", 1e-3)))


BAD = [(*it, case) for it in CLASSES for case in torchs_own(it[0], bad=True)]


@pytest.mark.parametrize(("kind", "twin", "case"), BAD, ids=lambda it: str(getattr(it, "__name__", "")))
def test_the_bad_inputs_of_torchs_own_tests_raise_torchs_errors(kind, twin, case):
    given = case.optimizer_error_input
    with pytest.raises(case.error_type) as ours:
        kind(given.params, **given.kwargs)
    with pytest.raises(case.error_type) as theirs:
        twin(given.params, **given.kwargs)
    assert str(ours.value) == str(theirs.value)


@each_optimizer
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"master": "fp16"}, "master must be 'split' or 'fp32', got 'fp16'"),
        ({"max_norm": 0.0}, "max_norm must be above 0, got 0.0; None turns clipping off"),
        ({"max_norm": 1.0, "guard": False}, "max_norm needs the guard: a non-finite norm would clip every grad to NaN"),
        ({"state_dtype": F16}, "state_dtype must be torch.float32, torch.bfloat16 or torch.int8, got torch.float16"),
    ],
    ids=str,
)
def test_bad_options_name_the_class(line, options, text):
    with pytest.raises(ValueError, match=f"^{line.kind.__name__}: {text}$"):
        line.ours(network().parameters(), **options)


def test_lion_refuses_bad_inputs():
    for options, text in (
        ({"lr": -1.0}, "lr must be 0 or above, got -1.0"),
        ({"betas": (0.9, 1.0)}, r"betas must be from 0 to below 1, got \(0.9, 1.0\)"),
        ({"weight_decay": -0.1}, "weight_decay must be 0 or above, got -0.1"),
    ):
        with pytest.raises(ValueError, match=f"^Lion: {text}$"):
            mpkernels.optim.Lion(network().parameters(), **options)


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


@each_optimizer
@pytest.mark.parametrize("whose", SCALERS)
@pytest.mark.parametrize("dtype", [torch.float32, F16, B16], ids=str)
@pytest.mark.parametrize("after", [0, 3])
def test_a_skipped_step_leaves_no_trace(line, whose, dtype, after):
    model = network(dtype)
    optimizer, scaler = line.ours(model.parameters(), max_norm=1.0), SCALERS[whose]("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))  # makes the scale, as a loss would
    for seed in range(after):
        backward(model, seed, scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
    before, states = weights(model), saved_numbers(optimizer)
    backward(model, 5, scaler.get_scale())
    next(model.parameters()).grad.view(-1)[0] = float("nan")
    scaler.step(optimizer)
    scaler.update()
    assert all_same_bits(before, weights(model))
    if after:
        assert_same_states(saved_numbers(optimizer), states)
    assert scaler.get_scale() == 4.0
    assert optimizer.step_was_skipped
    backward(model, 6, scaler.get_scale())
    scaler.step(optimizer)
    assert not all_same_bits(before, weights(model))


@each_optimizer
@pytest.mark.parametrize("whose", SCALERS)
def test_a_scaler_that_rounds_nothing_changes_nothing(line, whose):
    plain, scaled = network(), network()
    optimizers, scaler = [line.ours(it.parameters()) for it in (plain, scaled)], SCALERS[whose]("cpu", init_scale=16.0)
    scaler.scale(torch.zeros(()))
    for seed in range(4):
        backward(plain, seed)
        for a, b in zip(scaled.parameters(), plain.parameters(), strict=True):
            a.grad = b.grad * 16
        optimizers[0].step()
        scaler.step(optimizers[1])
        scaler.update()
    assert all_same_bits(weights(plain), weights(scaled))


@each_optimizer
def test_it_clips_as_clip_grad_norm_does(line):
    ours, theirs = network(), network()
    optimizer, reference = line.ours(ours.parameters(), max_norm=0.1), line.theirs(theirs.parameters())
    for steps in range(1, 8):
        backward(theirs, steps)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            a.grad = b.grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
        optimizer.step()
        reference.step()
        torch.testing.assert_close(optimizer.grad_norm, norm, rtol=1e-6, atol=0)
        assert_close(ours, theirs, 4 * steps, line.lr)


@each_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, B16], ids=str)
def test_steps_that_release_grads_are_the_same(line, dtype):
    whole, released = network(dtype), network(dtype)
    optimizers = [line.ours(it.parameters(), guard=False) for it in (whole, released)]
    release = optimizers[1].release_grads()
    for it, optimizer in zip((whole, released), optimizers, strict=True):
        train(it, optimizer, 4)
    release.remove()
    assert all_same_bits(weights(whole), weights(released))


@pytest.mark.exhaustive
@each_optimizer
def test_a_compiled_step_is_the_same(line):
    plain, compiled = network(), network()
    optimizers = [line.ours(it.parameters()) for it in (plain, compiled)]
    step = torch.compile(optimizers[1].step, backend="eager")
    for seed in range(3):
        for model in (plain, compiled):
            backward(model, seed)
        optimizers[0].step()
        step()
    torch.compiler.reset()
    assert all_same_bits(weights(plain), weights(compiled))


@each_optimizer
def test_a_scheduler_moves_a_tensor_lr_as_it_moves_a_float(line):
    by_float, by_tensor = network(), network()
    optimizers = line.ours(by_float.parameters()), line._replace(lr=torch.tensor(line.lr)).ours(by_tensor.parameters())
    schedulers = [torch.optim.lr_scheduler.StepLR(it, 2, 0.5) for it in optimizers]
    for seed in range(6):
        for model, optimizer, scheduler in zip((by_float, by_tensor), optimizers, schedulers, strict=True):
            backward(model, seed)
            optimizer.step()
            scheduler.step()
    assert_close(by_tensor, by_float, 24, line.lr)


@each_optimizer
@pytest.mark.parametrize("guard", [None, True])
@pytest.mark.parametrize("dense_steps", [0, 1])
def test_sparse_grads_are_refused(line, dense_steps, guard):
    embedding = torch.nn.Embedding(10, 3, sparse=True)
    optimizer = line.ours(embedding.parameters(), guard=guard)
    for _ in range(dense_steps):
        embedding.weight.grad = torch.ones(10, 3)
        optimizer.step()
    embedding.weight.grad = None
    embedding(torch.tensor([1, 2])).sum().backward()
    name = type(optimizer).__name__
    says = "Adam does not support sparse gradients, please consider SparseAdam instead"  # torch's words
    says = says if name.startswith("Adam") else f"{name} does not support sparse gradients"
    with pytest.raises(RuntimeError, match=f"^{says}$"):
        optimizer.step()


@each_optimizer
def test_complex_parameters_step_as_torchs_do(line):
    if line.twin.__name__ == "LionInPlainTorch":
        pytest.skip("a complex number's sign is no direction of each part")
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


@each_optimizer
def test_an_overflow_report_names_the_parameter(line):
    model = network()
    optimizer = line.ours(model.parameters(), guard=True)
    backward(model, 0)
    model[3].weight.grad[0, 0] = float("inf")
    optimizer.step()
    assert "3.weight" in str(optimizer.overflow_report(model))


def test_adams_decoupled_decay_is_adamws():
    ours, theirs = network(), network()
    train(ours, Adam(ours.parameters(), 1e-2, weight_decay=0.1, decoupled_weight_decay=True), 10)
    train(theirs, AdamW(theirs.parameters(), 1e-2, weight_decay=0.1), 10)
    assert all_same_bits(weights(ours), weights(theirs))


@each_optimizer
def test_metrics_read_the_norm_and_the_skips(line):
    model = network()
    optimizer = line.ours(model.parameters(), max_norm=1.0)
    metrics = mpkernels.Metrics(optimizer)
    train(model, optimizer, 2)
    assert metrics.read() == {"grad_norm": optimizer.grad_norm.item(), "skipped_steps": 0.0}
