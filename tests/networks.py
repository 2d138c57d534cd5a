"""A network that trains quickly, for tests of optimizers."""

import pytest
import torch

F16, B16 = torch.float16, torch.bfloat16
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread():
    """Compute with one thread: the networks are so small that threads slow them down, above all on busy cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def network(dtype=torch.float32, device=CPU, seed=1):
    torch.manual_seed(seed)
    layers = (torch.nn.Linear(20, 30), torch.nn.GELU(), torch.nn.LayerNorm(30), torch.nn.Linear(30, 5))
    return torch.nn.Sequential(*layers).to(device=device, dtype=dtype)


def batch(seed, device=CPU):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(64, n, generator=generator).to(device) for n in (20, 5)]


def backward(model, seed, scale=1.0):
    inputs, targets = batch(seed, model[0].weight.device)
    loss = (model(inputs.to(model[0].weight.dtype)).float() - targets).square().mean()
    model.zero_grad()
    (loss * scale).backward()
    return loss.item()


def train(model, optimizer, steps, first=0):
    loss = None
    for seed in range(first, first + steps):
        loss = backward(model, seed)
        optimizer.step()
    return loss


def assert_close(ours, theirs, steps, lr=1e-3):
    """Assert equality up to a handful of roundings a step, each by an ulp of the weight or of its update."""
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        bound = steps * 2**-23 * (2 * b.abs().max().item() + 8 * lr)
        assert (a - b).abs().max().item() <= bound
