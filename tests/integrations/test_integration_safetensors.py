"""Weights and optimizer states in files of safetensors come back bit for bit."""

import torch
from torch import nn
from torch.testing import assert_close

from mpkernels.optim import AdamW
from mpkernels.optim.masters import true_weight
from tests import libraries

libraries.need()
from safetensors.torch import load_file, load_model, save_file, save_model  # noqa: E402


def step(model, optimizer):
    inputs = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
    model(inputs.bfloat16()).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def made(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 1)).to(torch.bfloat16)
    return model, AdamW(model.parameters(), lr=1e-2)


def trained(model, optimizer):
    """Return masters and moments. A remainder alone, read as the bf16 that a checkpoint calls it, may be a NaN."""
    states = [(param, optimizer.state[param]) for param in model.parameters()]
    return [(true_weight(param, state), state["exp_avg"], state["exp_avg_sq"]) for param, state in states]


def test_a_training_goes_on_where_it_was_saved(tmp_path):
    model, optimizer = made(seed=0)
    for _ in range(3):
        step(model, optimizer)
    saved = optimizer.state_dict()
    tensors = {f"{number}.{key}": value for number, its in saved["state"].items() for key, value in its.items()}
    save_model(model, tmp_path / "model.safetensors")
    save_file(tensors, tmp_path / "optimizer.safetensors")

    other, other_optimizer = made(seed=1)
    load_model(other, tmp_path / "model.safetensors")
    state = {}
    for name, value in load_file(tmp_path / "optimizer.safetensors").items():
        number, key = name.split(".")
        state.setdefault(int(number), {})[key] = value
    other_optimizer.load_state_dict({"state": state, "param_groups": saved["param_groups"]})

    for side in ((model, optimizer), (other, other_optimizer)):
        step(*side)
    assert_close(trained(other, other_optimizer), trained(model, optimizer), rtol=0, atol=0)
