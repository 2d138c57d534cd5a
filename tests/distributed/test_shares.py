"""Which share of its square a part of a DTensor adds to a sum over all processes. The process group is fake."""

import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from benchmarks.many_gpus import among
from mpkernels.amp import clip_grad_norm_
from mpkernels.distributed.shares import Parts
from mpkernels.optim import AdamW, Masters


@pytest.mark.parametrize(
    ("placements", "parts"),
    [
        ([Shard(0), Shard(1)], 8),
        ([Shard(0), Replicate()], 2),  # four processes hold the same part
        ([Replicate(), Shard(0)], 4),  # HSDP: two processes hold the same part
        ([Replicate(), Replicate()], 1),
        (None, 1),  # a plain tensor
    ],
    ids=str,
)
def test_processes_that_hold_the_same_part_count_as_one(placements, parts):
    """The mesh's dimensions have different sizes, so that a test notices if they are confused."""

    def share():
        mesh, local = init_device_mesh("cpu", (2, 4)), torch.ones(2, 2)
        param = DTensor.from_local(local, mesh, placements, run_check=False) if placements else local
        return Parts(None, 8).shares([param])

    assert among(8, share) == [parts / 8]


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_another_norm_adds_up_shares_of_its_own_power(norm_type):
    """Of 8 processes, 4 hold the same part. The other processes don't exist, so that their summands are 0."""

    def norm():
        mesh = init_device_mesh("cpu", (2, 4))
        param = DTensor.from_local(torch.ones(16), mesh, [Shard(0), Replicate()], run_check=False)
        param.grad = 3 * param
        return clip_grad_norm_([param], math.inf, norm_type)

    assert among(8, norm) == pytest.approx(3 * (16 / 4) ** (1 / norm_type), rel=1e-6)


@pytest.mark.parametrize("make", [AdamW, lambda params, **options: Masters(torch.optim.SGD(params, lr=0.1), **options)])
def test_a_steps_norm_adds_up_shares(make):
    def norm():
        mesh = init_device_mesh("cpu", (2, 4))
        local = torch.ones(16, dtype=torch.bfloat16)
        param = torch.nn.Parameter(DTensor.from_local(local, mesh, [Shard(0), Replicate()], run_check=False))
        param.grad = 3 * param.detach()
        optimizer = make([param], max_norm=1.0)
        optimizer.step()
        return optimizer.grad_norm.item()

    assert among(8, norm) == pytest.approx(3 * (16 / 4) ** 0.5, rel=1e-6)
