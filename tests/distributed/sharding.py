"""Networks and parameters as DTensors of four processes, and the same in one process."""

import math
from functools import cache

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mpkernels.amp import clip_grad_norm_

WORLD = 4
STEPS, BAD_STEP = 5, 2


@cache
def mesh_of(kind):
    """Return a mesh, made only once, because each new mesh connects its processes again."""
    if kind == "fsdp2":
        return init_device_mesh("cpu", (distributed.get_world_size(),))
    return init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("rows", "columns"))


def network(dtype=torch.float32, seed=0):
    """Return a network for four processes. Their parts of 33 and of 7 rows are uneven, and only the first process has a
    part of the last layer."""
    torch.manual_seed(seed)
    layers = nn.Linear(20, 33), nn.GELU(), nn.LayerNorm(33), nn.Linear(33, 7), nn.Linear(7, 1)
    return nn.Sequential(*layers).to(dtype)


def even_network(dtype=torch.float32, seed=0):
    """Return a network. Each process has a multiple of 256 elements of each weight."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 32, bias=False), nn.GELU(), nn.Linear(32, 64, bias=False)).to(dtype)


def shard(model, kind, **policies):
    for module in (model[0], model):
        fully_shard(module, mesh=mesh_of(kind), **policies)
    return model


def backward(model, step, scale=1.0, inputs=None):
    """Run the same backward in each process, so that the grads equal their mean bit for bit."""
    weight = model[0].weight
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(8, weight.shape[1], generator=generator) if inputs is None else inputs
    (model(inputs.to(weight.dtype)).float().square().mean() * scale).backward()


def part_of(tensor):
    """Return this process's part of a DTensor, else the tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def wholes(model):
    return list(map(whole, model.parameters()))


def trained(model, make, scaler=None, clips=False, spoils=True):
    """Return the optimizer, and each step's outcome. ``spoils``: whether this process sets a grad to inf."""
    optimizer, outcomes = make(model.parameters()), []
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, step, 1.0 if scaler is None else scaler.scale(torch.ones(())))
        if step == BAD_STEP and spoils:
            part_of(model[0].weight.grad).view(-1)[5] = math.inf
        if clips:
            scaler.unscale_(optimizer)
            outcomes.append(whole(clip_grad_norm_(model.parameters(), 0.1)))
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
            outcomes.append(torch.tensor(scaler.get_scale()))
        outcomes += [getattr(optimizer, name, None) for name in ("grad_norm", "skipped_steps", "step_was_skipped")]
    return optimizer, outcomes
