"""A network that is trained in a blink, for tests of optimizers."""

import pytest
import torch

F16, B16 = torch.float16, torch.bfloat16
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread():
    """The networks are so small that threads cost more than they give, most of all where others use the cores too."""
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
    for seed in range(first, first + steps):
        loss = backward(model, seed)
        optimizer.step()
    return loss


def assert_close(ours, theirs, steps, lr=1e-3):
    """Both round a handful of times a step; each rounding moves a weight by an ulp of itself or of its update."""
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        bound = steps * 2**-23 * (2 * b.abs().max().item() + 8 * lr)
        assert (a - b).abs().max().item() <= bound
