"""Each optimizer keeps its state through checkpoints, ours and torch's, copies, files and changes of its options."""

import io

import pytest
import torch

import mpkernels
from tests.networks import B16, F16, assert_close, backward, network, train
from tests.optim.optimizers import (
    all_same_bits,
    assert_same_states,
    each_duplicate,
    each_optimizer,
    each_with_masters,
    saved_numbers,
    weights,
)


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
    assert_close(model, other, 8, line.rounded)


@each_with_masters
@each_duplicate
def test_a_copy_steps_as_the_original_does(line, duplicate):
    model = network(B16)
    both = model, line.ours(model.parameters(), max_norm=1.0)
    train(*both, 3)
    copied = duplicate(both)
    assert copied[1].grad_norm == both[1].grad_norm
    for model, optimizer in (both, copied):
        train(model, optimizer, 3, first=3)
    assert all_same_bits(weights(both[0]), weights(copied[0]))
    assert_same_states(saved_numbers(both[1]), saved_numbers(copied[1]))
    assert copied[1].max_norm == 1


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
        train(model, optimizer, steps_before)
    held = set(line.taken(mixed.parameters()))
    options = {"keep_fp32": [name for name, it in mixed.named_parameters() if it not in held]}
    mpkernels.amp.to_mixed(mixed, optimizer=optimizers[1], **options)
    mpkernels.amp.to_full(mixed, optimizers[1])
    assert all_same_bits(weights(plain), weights(mixed))
    mpkernels.amp.to_mixed(mixed, optimizer=optimizers[1], **options)
    assert mixed[0].weight.dtype == B16
    for seed in range(2):  # with the same grads, which each weight takes in its own dtype
        backward(mixed, seed)
        for a, b in zip(plain.parameters(), mixed.parameters(), strict=True):
            a.grad = b.grad.to(a.dtype)
        for optimizer in optimizers:
            optimizer.step()
    mpkernels.amp.to_full(mixed, optimizers[1])
    assert all_same_bits(weights(plain), weights(mixed))
    for model, optimizer in zip((plain, mixed), optimizers, strict=True):
        train(model, optimizer, 1, first=5)
    assert all_same_bits(weights(plain), weights(mixed))


@each_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, B16], ids=str)
def test_states_that_are_set_without_load_state_dict_train_on(line, dtype):
    """ZeroRedundancyOptimizer sets states as checkpoints hold them, and doesn't call load_state_dict."""
    model, other = network(dtype), network(dtype, seed=2)
    optimizer, loaded = line.ours(model.parameters()), line.ours(other.parameters())
    train(model, optimizer, 3)
    other.load_state_dict(model.state_dict())
    for number, param in enumerate(line.taken(other.parameters())):
        if state := optimizer.state_dict()["state"].get(number):
            loaded.state[param] = {key: it.clone() for key, it in state.items()}
    for it, its_optimizer in ((model, optimizer), (other, loaded)):
        train(it, its_optimizer, 3, first=3)
    assert all_same_bits(weights(model), weights(other))
