"""Each optimizer keeps its state through checkpoints, ours and torch's, copies, files and changes of its options."""

import copy
import io
import pickle

import pytest
import torch

import mpkernels
from mpkernels.optim import SGD
from tests.networks import B16, F16, assert_close, backward, network, train
from tests.optim.optimizers import all_same_bits, assert_same_states, each_optimizer, saved_numbers, weights


@each_optimizer
@pytest.mark.parametrize("state_dtype", [torch.float32, B16, torch.int8], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, B16, F16], ids=str)
@pytest.mark.parametrize("master", ["split", "fp32"])
def test_training_from_a_checkpoint_goes_on_with_the_same_bits(line, master, dtype, state_dtype):
    options = {"master": master, "max_norm": 1.0, "state_dtype": state_dtype}
    model = network(dtype)
    optimizer = line.ours(model.parameters(), **options)
    train(model, optimizer, 5)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    other = network(dtype, seed=2)
    loaded = line.ours(other.parameters(), **options)
    model_state, optimizer_state = torch.load(file, weights_only=True)
    loaded.load_state_dict(optimizer_state)
    other.load_state_dict(model_state)
    for it, its_optimizer in ((model, optimizer), (other, loaded)):
        train(it, its_optimizer, 3, first=5)
    assert all_same_bits(weights(model), weights(other))


@each_optimizer
def test_checkpoints_go_to_plain_torch_and_back_without_rounding(line):
    model, other = network(), network()
    optimizer, reference = line.ours(model.parameters()), line.theirs(other.parameters())
    train(model, optimizer, 3)
    saved = optimizer.state_dict()
    assert {key for state in saved["state"].values() for key in state} == {*line.states}
    before = saved_numbers(optimizer)
    reference.load_state_dict(saved)
    other.load_state_dict(model.state_dict())
    assert_same_states(saved_numbers(reference), before)
    train(other, reference, 1, first=3)
    after = saved_numbers(reference)
    model.load_state_dict(other.state_dict())
    optimizer.load_state_dict(reference.state_dict())
    assert_same_states(saved_numbers(optimizer), after)
    train(model, optimizer, 2, first=4)
    train(other, reference, 2, first=4)
    assert_close(model, other, 8, line.lr)


@each_optimizer
@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))], ids=["deepcopy", "pickle"]
)
def test_a_copy_steps_as_the_original_does(line, clone):
    model = network(B16)
    both = model, line.ours(model.parameters(), max_norm=1.0)
    train(*both, 3)
    copied = clone(both)
    train(*both, 3, first=3)
    train(*copied, 3, first=3)
    assert all_same_bits(weights(model), weights(copied[0]))


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.int8], ids=str)
def test_momentum_may_be_switched_on_and_off(state_dtype):
    """As in torch, the buffer begins with the first grad that comes while momentum is on."""
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


def test_groups_with_and_without_momentum_step_as_torchs():
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


def test_a_skipped_first_step_saves_no_momentum_buffer():
    """No buffer is saved, so that torch's begins with the next grad, as ours does."""
    model = network()
    optimizer = SGD(model.parameters(), 0.01, momentum=0.9, dampening=0.5, guard=True)
    backward(model, 0)
    model[0].weight.grad[0, 0] = float("nan")
    optimizer.step()
    assert all(state == {} for state in optimizer.state_dict()["state"].values())


@each_optimizer
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, B16], ids=str)
def test_the_memory_report_predicts_the_states(line, dtype, state_dtype):
    model = network(dtype)
    optimizer = line.ours(model.parameters(), state_dtype=state_dtype)
    predicted = mpkernels.memory_report(model, optimizer).predicted
    train(model, optimizer, 1)
    assert mpkernels.memory_report(model, optimizer).predicted == predicted


@each_optimizer
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("master", ["split", "fp32"])
def test_to_mixed_keeps_its_weights_as_masters_and_to_full_gives_them_back(line, master, steps_before):
    plain, mixed = network(), network()
    optimizers = [line.ours(it.parameters(), master=master) for it in (plain, mixed)]
    for model, optimizer in zip((plain, mixed), optimizers, strict=True):
        for seed in range(steps_before):
            backward(model, seed)
            optimizer.step()
    mpkernels.amp.to_mixed(mixed, optimizer=optimizers[1])
    mpkernels.amp.to_full(mixed, optimizers[1])
    assert all_same_bits(weights(plain), weights(mixed))
    mpkernels.amp.to_mixed(mixed, optimizer=optimizers[1])
    assert mixed[0].weight.dtype == B16
    for seed in range(2):  # with the same grads, which each weight takes in its own dtype
        backward(mixed, seed)
        for a, b in zip(plain.parameters(), mixed.parameters(), strict=True):
            a.grad = b.grad.to(a.dtype)
        for optimizer in optimizers:
            optimizer.step()
    mpkernels.amp.to_full(mixed, optimizers[1])
    assert all_same_bits(weights(plain), weights(mixed))
    backward(plain, 5)
    backward(mixed, 5)
    for optimizer in optimizers:
        optimizer.step()
    assert all_same_bits(weights(plain), weights(mixed))


@each_optimizer
def test_a_file_loads_wholly_or_not_at_all(line, tmp_path):
    model, other = network(B16), network(B16, seed=2)
    optimizer, loaded = (line.ours(it.parameters(), max_norm=1.0) for it in (model, other))
    train(model, optimizer, 2)
    train(other, loaded, 1)
    mpkernels.checkpoint.save(tmp_path / "it.pt", model=model, optimizer=optimizer)
    before = weights(other)
    with pytest.raises(Exception, match="bad"):
        mpkernels.checkpoint.load(tmp_path / "it.pt", model=other, optimizer=loaded, bad=network())
    assert all_same_bits(before, weights(other))
    mpkernels.checkpoint.load(tmp_path / "it.pt", model=other, optimizer=loaded)
    for it, its_optimizer in ((model, optimizer), (other, loaded)):
        train(it, its_optimizer, 2, first=2)
    assert all_same_bits(weights(model), weights(other))


@each_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, B16], ids=str)
def test_states_that_are_set_without_load_state_dict_train_on(line, dtype):
    """ZeroRedundancyOptimizer sets states as checkpoints hold them, and doesn't call load_state_dict."""
    model, other = network(dtype), network(dtype, seed=2)
    optimizer, loaded = line.ours(model.parameters()), line.ours(other.parameters())
    train(model, optimizer, 3)
    other.load_state_dict(model.state_dict())
    for number, param in enumerate(other.parameters()):
        if state := optimizer.state_dict()["state"].get(number):
            loaded.state[param] = {key: it.clone() for key, it in state.items()}
    for it, its_optimizer in ((model, optimizer), (other, loaded)):
        train(it, its_optimizer, 3, first=3)
    assert all_same_bits(weights(model), weights(other))
