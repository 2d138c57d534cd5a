"""DTensors, as FSDP2 and tensor parallelism make them, are refused at the door, before anything changes."""

import pytest
import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from mpkernels.amp import GradScaler, clip_grad_norm_
from mpkernels.optim import AdamW
from tests.networks import network

REFUSED = (
    r"\[0\] must be a plain tensor, got a DTensor on \((Shard|Replicate).*\), as FSDP2's fully_shard and tensor "
    r"parallelism's parallelize_module make them; torch\.{} takes these, and under DDP, FSDP1 "
    r"\(FullyShardedDataParallel\) and ZeroRedundancyOptimizer parameters are plain$"
)


@pytest.fixture(params=["fully_shard", "parallelize_module"])
def sharded(request):
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    if request.param == "fully_shard":
        model = fully_shard(network(), mesh=mesh)
    else:
        model = parallelize_module(network(), mesh, {"0": ColwiseParallel(), "3": RowwiseParallel()})
    model(torch.ones(2, 20)).sum().backward()
    yield model
    torch.distributed.destroy_process_group()


def test_by_adamw(sharded):
    with pytest.raises(TypeError, match="^AdamW: params" + REFUSED.format(r"optim\.AdamW")):
        AdamW(sharded.parameters())
    optimizer = AdamW([torch.ones(3, requires_grad=True)])
    with pytest.raises(TypeError, match="^AdamW: params" + REFUSED.format(r"optim\.AdamW")):
        optimizer.add_param_group({"params": list(sharded.parameters())})
    assert len(optimizer.param_groups) == 1
    optimizer.param_groups[0]["params"] = list(sharded.parameters())
    with pytest.raises(TypeError, match="^AdamW: params" + REFUSED.format(r"optim\.AdamW")):
        optimizer.step()


def test_by_the_scaler_and_by_clipping(sharded):
    optimizer, scaler = torch.optim.SGD(sharded.parameters()), GradScaler("cpu")
    scaler.scale(torch.ones(()))
    for refuse in (scaler.unscale_, scaler.step):
        with pytest.raises(TypeError, match="^GradScaler: params" + REFUSED.format(r"amp\.GradScaler")):
            refuse(optimizer)
    with pytest.raises(TypeError, match="^clip_grad_norm_: grads" + REFUSED.format("nn.utils.clip_grad_norm_")):
        clip_grad_norm_(sharded.parameters(), 1.0)
