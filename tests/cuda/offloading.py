"""Small models whose optimizer is offloaded, and helpers to compare it with one that isn't."""

import pytest
import torch
from torch import nn

from mpkernels._shared.parameters import real
from mpkernels.amp import GradScaler
from mpkernels.optim import AdamW
from mpkernels.optim.offload import plan, slots, streamed_plan
from tests.cuda.training import CUDA
from tests.hard_grads import same_bits
from tests.networks import B16, F16
from tests.optim.optimizers import OPTIMIZERS

F32, INT8 = torch.float32, torch.int8
SHAPES = (24, 32), (32,), (7, 5), (), (0, 3), (300,), (64, 9)
SQUARE = [(64, 64)] * 6  # each fills a bucket


def buckets_of(size):
    """Return a fixture that divides the parameters of all tests in a file into buckets of so many bytes."""

    @pytest.fixture(autouse=True)
    def buckets(monkeypatch):
        for module in (plan, slots, streamed_plan):
            monkeypatch.setattr(module, "BUCKET", size)

    return buckets


def parameters(dtype, place=CUDA, shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype).to(place)) for shape in shapes]


def loss_of(params, seed, poisons=False, without=()):
    """Return a loss whose grads are random numbers, which the device computes as late as in a training."""
    generator, terms = torch.Generator().manual_seed(seed), []
    for i, param in enumerate(params):
        grad = torch.randn(param.shape, generator=generator)
        if poisons and i == 2:
            grad[3, 1] = torch.inf
        if i not in without:
            terms.append((param * grad.to(param.dtype).to(param.device)).sum().float().to(params[0].device))
    return torch.stack(terms).sum()


def take_step(optimizer, scaler, loss):
    if scaler is None:
        loss.backward()
        optimizer.step()
    else:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def trained(optimizer, params, scaler=None, bad_step=2, steps=4):
    for step in range(steps):
        optimizer.zero_grad()
        take_step(optimizer, scaler, loss_of(params, step, step == bad_step))
    return optimizer


def visible_state(optimizer, norm=True):
    """Return copies on the host of all state that a user can see. The current stream copies the weights."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    found = [real(param.detach().cpu()) for param in params]
    saved = optimizer.state_dict()["state"]
    found += [real(torch.as_tensor(it).cpu()) for i in sorted(saved) for _, it in sorted(saved[i].items())]
    outcome = optimizer.grad_norm if norm else None, optimizer.skipped_steps
    return [*found, *(it if it is None else it.cpu() for it in outcome)]


def are_same(found, wanted):
    pairs = list(zip(found, wanted, strict=True))
    return all(mine is theirs or same_bits(mine, theirs) for mine, theirs in pairs)


def assert_same(ours, theirs, norm=True):
    assert are_same(visible_state(ours, norm), visible_state(theirs, norm))
    assert all(it.device.type == "cpu" for state in ours.state.values() for it in state.values())


SCALERS = {
    "no scaler": lambda: None,
    "ours": lambda: GradScaler("cuda", init_scale=8.0),
    "torch's": lambda: torch.amp.GradScaler("cuda", init_scale=8.0),
}
KINDS = [(F32, "split", F32), (B16, "split", INT8), (B16, "fp32", B16), (F16, "split", F32)]
for_each_kind = pytest.mark.parametrize(("dtype", "master", "state_dtype"), KINDS, ids=str)
in_each_way = pytest.mark.parametrize("way", [True, "stream"])
released_or_not = pytest.mark.parametrize(("way", "released"), [(True, False), (True, True), ("stream", False)])
RULES = [OPTIMIZERS["AdamW"], OPTIMIZERS["SGD, momentum"]]


def offloaded(dtype=B16, shapes=SQUARE, released=False, place=CUDA, way=True, **options):
    params = parameters(dtype, place, shapes)
    optimizer = AdamW(params, lr=0.01, offload=way, **options)
    if released:
        optimizer.release_grads()
    return params, optimizer


def size(tensors):
    return sum(it.numel() * it.itemsize for it in tensors)
