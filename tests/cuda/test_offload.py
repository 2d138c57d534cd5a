"""offload=True: what it computes is to the bit what the same optimizer computes without."""

import pytest
import torch
from torch import nn

from mpkernels.amp import GradScaler
from tests.cases import same_bits
from tests.cuda.training import CUDA
from tests.networks import B16, F16
from tests.optim.optimizers import OPTIMIZERS

F32, INT8 = torch.float32, torch.int8
SHAPES = (24, 32), (32,), (7, 5), (), (0, 3), (300,)


def parameters(dtype, place=CUDA):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype).to(place)) for shape in SHAPES]


def give_grads(params, step, scale=1.0, poisons=False):
    generator = torch.Generator().manual_seed(step)
    for i, param in enumerate(params):
        grad = torch.randn(param.shape, generator=generator) * scale
        if poisons and i == 2:
            grad[3, 1] = torch.inf
        param.grad = grad.to(param.dtype).to(param.device)


def trained(line, dtype, scaler, bad_step=2, steps=4, **options):
    params = parameters(dtype)
    optimizer = line.ours(params, **options)
    for step in range(steps):
        optimizer.zero_grad()
        scale = 1.0 if scaler is None else scaler.scale(torch.ones((), device=CUDA)).item()
        give_grads(params, step, scale, step == bad_step)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    return params, optimizer


def all_of(params, optimizer):
    torch.cuda.synchronize()
    saved = optimizer.state_dict()["state"]
    held = [torch.as_tensor(it).cpu() for i in sorted(saved) for _, it in sorted(saved[i].items())]
    told = [it if it is None else it.cpu() for it in (optimizer.grad_norm, optimizer.skipped_steps)]
    return [*(param.detach().cpu() for param in params), *held, *told]


SCALERS = {
    "no scaler": lambda: None,
    "ours": lambda: GradScaler("cuda", init_scale=8.0),
    "torch's": lambda: torch.amp.GradScaler("cuda", init_scale=8.0),
}


@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize(
    ("dtype", "master", "state_dtype"),
    [(F32, "split", F32), (B16, "split", INT8), (B16, "fp32", B16), (F16, "split", F32)],
    ids=str,
)
@pytest.mark.parametrize("line", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_bits(line, dtype, master, state_dtype, scaler, max_norm):
    if scaler == "torch's" and dtype != F32:
        pytest.skip("torch's scaler refuses such grads")
    options = {"master": master, "state_dtype": state_dtype, "max_norm": max_norm}
    bad = -1 if dtype == F32 and scaler == "no scaler" and max_norm is None else 2
    ours = trained(line, dtype, SCALERS[scaler](), bad, offload=True, **options)
    wanted = trained(line, dtype, SCALERS[scaler](), bad, **options)
    assert all(it.device.type == "cpu" for state in ours[1].state.values() for it in state.values())
    for mine, theirs in zip(all_of(*ours), all_of(*wanted), strict=True):
        assert mine is theirs or same_bits(mine, theirs)
