"""What the rest of the package does with an optimizer, it does with each: to 16-bit weights and back, a load that is
undone."""

import pytest
import torch

import mpkernels
from tests.cases import same_bits
from tests.networks import B16, backward, network, one_thread, train
from tests.optim.optimizers import of_each, weights

__all__ = ["one_thread"]  # a fixture that each test uses


@of_each
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
    assert mixed[0].weight.dtype == B16
    for seed in range(2):  # with the same grads, which each weight takes in its own dtype
        backward(mixed, seed)
        for a, b in zip(plain.parameters(), mixed.parameters(), strict=True):
            a.grad = b.grad.to(a.dtype)
        for optimizer in optimizers:
            optimizer.step()
    mpkernels.amp.to_full(mixed, optimizers[1])
    assert all(map(same_bits, weights(plain), weights(mixed)))
    backward(plain, 5)
    backward(mixed, 5)
    for optimizer in optimizers:
        optimizer.step()
    assert all(map(same_bits, weights(plain), weights(mixed)))


@of_each
def test_a_checkpoint_of_one_file_undoes_what_fails(line, tmp_path):
    model, other = network(), network(seed=2)
    optimizer, loaded = line.ours(model.parameters()), line.ours(other.parameters())
    train(model, optimizer, 2)
    train(other, loaded, 1)
    mpkernels.checkpoint.save(tmp_path / "it.pt", model=model, optimizer=optimizer)
    before = weights(other)
    with pytest.raises(Exception, match="bad"):
        mpkernels.checkpoint.load(tmp_path / "it.pt", model=other, optimizer=loaded, bad=network())
    assert all(map(same_bits, before, weights(other)))
    mpkernels.checkpoint.load(tmp_path / "it.pt", model=other, optimizer=loaded)
    for it, its_optimizer in ((model, optimizer), (other, loaded)):
        train(it, its_optimizer, 2, first=2)
    assert all(map(same_bits, weights(model), weights(other)))


@of_each
@pytest.mark.parametrize("dtype", [torch.float32, B16], ids=str)
def test_states_that_a_loader_puts_in_place_go_on(line, dtype):
    """As ZeroRedundancyOptimizer loads them: past load_state_dict, as checkpoints hold them."""
    model, other = network(dtype), network(dtype, seed=2)
    optimizer, loaded = line.ours(model.parameters()), line.ours(other.parameters())
    train(model, optimizer, 3)
    other.load_state_dict(model.state_dict())
    for number, param in enumerate(other.parameters()):
        if state := optimizer.state_dict()["state"].get(number):
            loaded.state[param] = {key: it.clone() for key, it in state.items()}
    for it, its_optimizer in ((model, optimizer), (other, loaded)):
        train(it, its_optimizer, 3, first=3)
    assert all(map(same_bits, weights(model), weights(other)))
