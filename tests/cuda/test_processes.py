"""Several processes with tensors on CUDA devices, by gloo; for captured steps, torch's fake process group."""

import copy
import warnings
from contextlib import contextmanager

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from mpkernels.amp import GradScaler
from mpkernels.optim import AdamW
from tests.cuda.training import CUDA, batch, network
from tests.distributed.sharding import wholes
from tests.processes import needs_gloo, spawn

STEPS = 3


def train(model, place, rank=None, scaler_options=None):
    """Train. Each rank takes half of a batch; without a rank, take all of it."""
    optimizer = AdamW(model.parameters(), lr=1e-2, max_norm=0.5)
    scaler = GradScaler(place.type, init_scale=8.0)
    for step in range(STEPS):
        x = batch(step, place)
        x = x if rank is None else x.chunk(2)[rank]
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [it.cpu() for it in wholes(model)]


def check(rank, wraps):
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    torch.cuda.set_device(rank % torch.cuda.device_count())
    place = torch.device("cuda", torch.cuda.current_device())
    model = nn.Sequential(*network("cpu"))
    wanted = train(copy.deepcopy(model), torch.device("cpu"))
    for ours, theirs in zip(train(wraps(model.to(place)), place, rank), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-4)


def under_ddp(rank):
    check(rank, lambda model: nn.parallel.DistributedDataParallel(model))


@needs_gloo
def test_processes_train_as_one_does(tmp_path):
    """Under DDP only: under FSDP2, gloo would read the devices' memory as if it were the host's, a fault of torch's."""
    spawn(under_ddp, tmp_path)


@contextmanager
def fake_processes(world):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    yield
    distributed.destroy_process_group()


def test_fsdp2_trains_as_a_plain_model_does():
    """A single process, whose collectives only copy."""
    model = nn.Sequential(*network("cpu"))
    wanted = train(copy.deepcopy(model), torch.device("cpu"))
    with fake_processes(1), warnings.catch_warnings(action="ignore"):
        got = train(fully_shard(model.to(CUDA)), CUDA)
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-4)


@pytest.fixture
def _two_fake_processes():
    with fake_processes(2):
        yield


@pytest.mark.usefixtures("_two_fake_processes")
def test_a_sharded_step_can_be_captured():
    """The collectives do nothing. The test shows that no part of the step waits, asks a device or frees memory."""
    torch.manual_seed(0)
    params = [DTensor.from_local(torch.ones(8, 4, device=CUDA), distributed.device_mesh.init_device_mesh("cuda", (2,)))]
    params = [nn.Parameter(param) for param in params]
    optimizer = AdamW(params, lr=0.1, max_norm=1.0)
    scaler = GradScaler("cuda", init_scale=4.0)
    grads = [torch.ones_like(param) for param in params]

    def step():
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        scaler.scale(torch.ones((), device=CUDA))
        scaler.step(optimizer)
        scaler.update()

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    before = params[0].to_local().clone()
    graph.replay()
    assert not torch.equal(params[0].to_local(), before)
    assert torch.isfinite(params[0].to_local()).all()
