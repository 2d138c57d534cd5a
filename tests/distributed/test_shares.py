"""Which share of its square a part of a DTensor adds to a sum over all processes. The process group is fake."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from benchmarks.many_gpus import among
from mpkernels.distributed.meshes import Parts


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
