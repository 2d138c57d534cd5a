"""Each optimizer as a drop-in: what AdamW can, all can."""

import copy
import io
import pickle

import pytest
import torch
from torch.testing._internal import common_optimizers

import mpkernels
from mpkernels.optim import SGD, Adam
from tests.cases import same_bits
from tests.networks import B16, F16, assert_close, backward, network, one_thread, train
from tests.optim.optimizers import OPTIMIZERS

__all__ = ["one_thread"]  # a fixture that each test uses
of_each = pytest.mark.parametrize("line", OPTIMIZERS.values(), ids=OPTIMIZERS)
SCALERS = {"ours": mpkernels.GradScaler, "torch's": torch.amp.GradScaler}


def same(some, others):
    return all(map(same_bits, some, others))


def weights(model):
    return [param.detach().clone() for param in model.parameters()]


def tensors_of(optimizer):
    """Return all numbers of an optimizer's state dict, by parameter and key."""
    states = optimizer.state_dict()["state"]
    return {(number, key): torch.as_tensor(it).clone() for number, state in states.items() for key, it in state.items()}


def assert_same_states(some, others):
    assert some.keys() == others.keys()
    assert all(same_bits(it, others[key]) for key, it in some.items())


@of_each
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


def lockstep(kind, twin, case):
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


@pytest.mark.parametrize("case", common_optimizers.optim_inputs_func_adam("cpu"), ids=lambda case: case.desc)
def test_torchs_own_inputs_of_adam(case):
    lockstep(Adam, torch.optim.Adam, case)


@pytest.mark.parametrize("case", common_optimizers.optim_inputs_func_sgd("cpu"), ids=lambda case: case.desc)
def test_torchs_own_inputs_of_sgd(case):
    lockstep(SGD, torch.optim.SGD, case)


BAD = [(Adam, torch.optim.Adam, it) for it in common_optimizers.optim_error_inputs_func_adam("cpu", torch.float32)]
BAD += [(SGD, torch.optim.SGD, it) for it in common_optimizers.optim_error_inputs_func_sgd("cpu", torch.float32)]


@pytest.mark.parametrize(("kind", "twin", "case"), BAD, ids=lambda it: str(getattr(it, "__name__", "")))
def test_torchs_own_bad_inputs(kind, twin, case):
    given = case.optimizer_error_input
    with pytest.raises(case.error_type) as ours:
        kind(given.params, **given.kwargs)
    with pytest.raises(case.error_type) as theirs:
        twin(given.params, **given.kwargs)
    assert str(ours.value) == str(theirs.value)


@of_each
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"master": "fp16"}, "master must be 'split' or 'fp32', got 'fp16'"),
        ({"max_norm": 0.0}, "max_norm must be above 0, got 0.0"),
        ({"state_dtype": F16}, "state_dtype must be torch.float32, torch.bfloat16 or torch.int8, got torch.float16"),
    ],
    ids=str,
)
def test_bad_options_name_the_class(line, options, text):
    with pytest.raises(ValueError, match=f"^{line.kind.__name__}: {text}$"):
        line.ours(network().parameters(), **options)


def test_lions_own_bad_inputs():
    for options, text in (
        ({"lr": -1.0}, "lr must be 0 or above, got -1.0"),
        ({"betas": (0.9, 1.0)}, r"betas must be from 0 to below 1, got \(0.9, 1.0\)"),
        ({"weight_decay": -0.1}, "weight_decay must be 0 or above, got -0.1"),
    ):
        with pytest.raises(ValueError, match=f"^Lion: {text}$"):
            mpkernels.optim.Lion(network().parameters(), **options)


@of_each
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


@of_each
@pytest.mark.parametrize("whose", SCALERS)
@pytest.mark.parametrize("dtype", [torch.float32, F16, B16], ids=str)
@pytest.mark.parametrize("after", [0, 3])
def test_a_skipped_step_leaves_no_trace(line, whose, dtype, after):
    model = network(dtype)
    optimizer, scaler = line.ours(model.parameters(), max_norm=1.0), SCALERS[whose]("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))  # whoever trains begins with this
    for seed in range(after):
        backward(model, seed, scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
    before, states = weights(model), tensors_of(optimizer)
    backward(model, 5, scaler.get_scale())
    next(model.parameters()).grad.view(-1)[0] = float("nan")
    scaler.step(optimizer)
    scaler.update()
    assert same(before, weights(model))
    if after:
        assert_same_states(tensors_of(optimizer), states)
    assert scaler.get_scale() == 4.0
    assert optimizer.step_was_skipped
    backward(model, 6, scaler.get_scale())
    scaler.step(optimizer)
    assert not same(before, weights(model))


@of_each
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
    assert same(weights(plain), weights(scaled))


@of_each
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


@of_each
@pytest.mark.parametrize("state_dtype", [torch.float32, B16, torch.int8], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, B16, F16], ids=str)
def test_a_checkpoint_goes_on_with_the_same_bits(line, dtype, state_dtype):
    model = network(dtype)
    optimizer = line.ours(model.parameters(), state_dtype=state_dtype)
    train(model, optimizer, 5)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    other = network(dtype, seed=2)
    loaded = line.ours(other.parameters(), state_dtype=state_dtype)
    of_model, of_optimizer = torch.load(file)
    loaded.load_state_dict(of_optimizer)
    other.load_state_dict(of_model)
    for it, its_optimizer in ((model, optimizer), (other, loaded)):
        train(it, its_optimizer, 3, first=5)
    assert same(weights(model), weights(other))


@of_each
def test_checkpoints_go_to_plain_torch_and_back_without_rounding(line):
    model, other = network(), network()
    optimizer, reference = line.ours(model.parameters()), line.theirs(other.parameters())
    train(model, optimizer, 3)
    saved = optimizer.state_dict()
    assert {key for state in saved["state"].values() for key in state} == {*line.states}
    before = tensors_of(optimizer)
    reference.load_state_dict(saved)
    other.load_state_dict(model.state_dict())
    assert_same_states(tensors_of(reference), before)
    train(other, reference, 1, first=3)
    after = tensors_of(reference)
    model.load_state_dict(other.state_dict())
    optimizer.load_state_dict(reference.state_dict())
    assert_same_states(tensors_of(optimizer), after)
    train(model, optimizer, 2, first=4)
    train(other, reference, 2, first=4)
    assert_close(model, other, 8, line.lr)


@of_each
@pytest.mark.parametrize("dtype", [torch.float32, B16], ids=str)
def test_grads_may_be_released_in_the_backward(line, dtype):
    whole, released = network(dtype), network(dtype)
    optimizers = [line.ours(it.parameters(), guard=False) for it in (whole, released)]
    release = optimizers[1].release_grads()
    for it, optimizer in zip((whole, released), optimizers, strict=True):
        train(it, optimizer, 4)
    release.remove()
    assert same(weights(whole), weights(released))


@of_each
@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))], ids=["deepcopy", "pickle"]
)
def test_a_copy_goes_on_alike(line, clone):
    model = network(B16)
    both = model, line.ours(model.parameters(), max_norm=1.0)
    train(*both, 3)
    copied = clone(both)
    train(*both, 3, first=3)
    train(*copied, 3, first=3)
    assert same(weights(model), weights(copied[0]))


@of_each
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
    assert same(weights(plain), weights(compiled))


@of_each
def test_a_scheduler_and_a_tensor_lr(line):
    by_float, by_tensor = network(), network()
    optimizers = line.ours(by_float.parameters()), line._replace(lr=torch.tensor(line.lr)).ours(by_tensor.parameters())
    schedulers = [torch.optim.lr_scheduler.StepLR(it, 2, 0.5) for it in optimizers]
    for seed in range(6):
        for model, optimizer, scheduler in zip((by_float, by_tensor), optimizers, schedulers, strict=True):
            backward(model, seed)
            optimizer.step()
            scheduler.step()
    assert_close(by_tensor, by_float, 24, line.lr)


@of_each
def test_sparse_grads_are_refused(line):
    embedding = torch.nn.Embedding(10, 3, sparse=True)
    optimizer = line.ours(embedding.parameters())
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()


@of_each
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


@of_each
def test_an_overflow_report_names_the_parameter(line):
    model = network()
    optimizer = line.ours(model.parameters(), guard=True)
    backward(model, 0)
    model[3].weight.grad[0, 0] = float("inf")
    optimizer.step()
    assert "3.weight" in str(optimizer.overflow_report(model))


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.int8], ids=str)
def test_momentum_that_comes_and_goes(state_dtype):
    """As torch's, whose buffer begins with the first grad that it sees."""
    ours, theirs = network(), network()
    optimizers = [SGD(ours.parameters(), 0.01, state_dtype=state_dtype), torch.optim.SGD(theirs.parameters(), 0.01)]
    for seed, momentum in enumerate([0, 0, 0.9, 0.9, 0, 0.9]):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.param_groups[0]["momentum"] = momentum
            backward(model, seed)
            optimizer.step()
    rtol = 1e-5 if state_dtype == torch.float32 else 2e-2
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol)


def test_groups_with_momentum_and_without():
    ours, theirs = network(), network()
    optimizers = []
    for model, kind in ((ours, SGD), (theirs, torch.optim.SGD)):
        first, *rest = model.parameters()
        optimizers.append(kind([{"params": [first], "momentum": 0.9}, {"params": rest, "weight_decay": 0.1}], lr=0.01))
    for seed in range(6):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            backward(model, seed)
            optimizer.step()
    assert_close(ours, theirs, 60, 0.01)
    assert [len(optimizers[0].state.get(it, {})) for it in ours.parameters()] == [2, 0, 0, 0, 0, 0]


def test_a_buffer_that_has_not_begun_is_none_to_torch():
    """Where each step so far was skipped, torch's buffer still begins with the next grad."""
    model = network()
    optimizer = SGD(model.parameters(), 0.01, momentum=0.9, dampening=0.5, guard=True)
    backward(model, 0)
    model[0].weight.grad[0, 0] = float("nan")
    optimizer.step()
    assert all(state == {} for state in optimizer.state_dict()["state"].values())


def test_adams_decoupled_decay_is_adamws():
    ours, theirs = network(), network()
    train(ours, Adam(ours.parameters(), 1e-2, weight_decay=0.1, decoupled_weight_decay=True), 10)
    train(theirs, mpkernels.optim.AdamW(theirs.parameters(), 1e-2, weight_decay=0.1), 10)
    assert same(weights(ours), weights(theirs))


@of_each
def test_metrics_follow_it(line):
    model = network()
    optimizer = line.ours(model.parameters(), max_norm=1.0)
    metrics = mpkernels.Metrics(optimizer)
    train(model, optimizer, 2)
    assert metrics.read() == {"grad_norm": optimizer.grad_norm.item(), "skipped_steps": 0.0}


@of_each
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, B16], ids=str)
def test_the_memory_report_predicts_its_states(line, dtype, state_dtype):
    model = network(dtype)
    optimizer = line.ours(model.parameters(), state_dtype=state_dtype)
    predicted = mpkernels.memory_report(model, optimizer).predicted
    train(model, optimizer, 1)
    assert mpkernels.memory_report(model, optimizer).predicted == predicted


@of_each
@pytest.mark.parametrize("steps_before", [1, 2])
def test_to_mixed_makes_masters_of_its_weights(line, steps_before):
    model, mixed = network(), network()
    optimizers = [line.ours(it.parameters(), guard=False) for it in (model, mixed)]
    for it, optimizer in zip((model, mixed), optimizers, strict=True):
        train(it, optimizer, steps_before)
    mpkernels.to_mixed(mixed, optimizer=optimizers[1])
    for a, b in zip(model.parameters(), mixed.parameters(), strict=True):
        a.grad = torch.ones_like(a)
        b.grad = torch.ones_like(b)
    for optimizer in optimizers:
        optimizer.step()
    for a, b in zip(model.parameters(), mixed.parameters(), strict=True):
        assert same_bits(a.detach().to(b.dtype), b.detach())


@of_each
def test_a_file_takes_up_all_of_a_training(line, tmp_path):
    model = network(B16)
    optimizer = line.ours(model.parameters(), max_norm=1.0)
    train(model, optimizer, 2)
    mpkernels.checkpoint.save(tmp_path / "file", model=model, optimizer=optimizer)
    other = network(B16, seed=2)
    loaded = line.ours(other.parameters(), max_norm=1.0)
    mpkernels.checkpoint.load(tmp_path / "file", model=other, optimizer=loaded)
    train(model, optimizer, 2, first=2)
    train(other, loaded, 2, first=2)
    assert same(weights(model), weights(other))
