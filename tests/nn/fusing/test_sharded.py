"""Fused models compute the same under FSDP2, DDP and tensor parallelism, whether fuse comes before or after these."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from mpkernels.nn import fuse, unfuse
from tests.nn.fusing.feed_forwards import KINDS, made
from tests.nn.fusing.models import Chain, Mlp, X, recorded_ops
from tests.processes import alone, needs_gloo


def losses(model):
    """Return the losses of three steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(X).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@needs_gloo
@pytest.mark.parametrize("fused_first", [True, False], ids=["fused first", "fused last"])
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # torch warns of plain models, too: Linear returns a view
def test_a_fused_model_trains_under_fsdp2(fused_first):
    want = losses(nn.Sequential(Mlp(), Chain()))
    with alone():
        mesh = init_device_mesh("cpu", (1,))
        model = nn.Sequential(Mlp(), Chain())
        if fused_first:
            fuse(model)
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
        report = fuse(model)
        assert len(report.fused) == 2
        with recorded_ops() as ran:
            assert losses(model) == pytest.approx(want, rel=1e-5)
        assert ran == 6 * ["mlp"]
        assert isinstance(model[0], FSDPModule)
        assert type(model[0]).__name__ == "FSDPMlp"
        unfuse(model)
        assert isinstance(model[0], FSDPModule)
        with recorded_ops() as ran:
            losses(model)
        assert ran == []


@pytest.mark.exhaustive
@pytest.mark.each_value_once
@needs_gloo
@pytest.mark.parametrize("fused_first", [True, False], ids=["fused first", "fused last"])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_the_mlps_of_timm_and_diffusers_train_under_fsdp2(name, fused_first):
    want = losses(made(name))
    with alone():
        mesh = init_device_mesh("cpu", (1,))
        model = made(name)
        if fused_first:
            fuse(model)
        fully_shard(model, mesh=mesh)
        assert len(fuse(model).fused) == 1
        with recorded_ops() as ran:
            assert losses(model) == pytest.approx(want, rel=1e-5)
        assert ran == 3 * [KINDS[name][1]]


@needs_gloo
@pytest.mark.filterwarnings("ignore")  # DDP's own
@pytest.mark.parametrize("fused_first", [True, False], ids=["fused first", "fused last"])
def test_a_fused_model_trains_under_ddp(fused_first):
    want = losses(Chain())
    with alone():
        model = Chain()
        if fused_first:
            fuse(model)
        model = DistributedDataParallel(model, find_unused_parameters=True)
        fuse(model)
        with recorded_ops() as ran:
            assert losses(model) == pytest.approx(want, rel=1e-5)
        assert ran == 3 * ["mlp"]


@needs_gloo
@pytest.mark.parametrize("fused_first", [True, False], ids=["fused first", "fused last"])
def test_under_tensor_parallelism_the_plain_lines_run(fused_first):
    """Tensor parallelism puts hooks on its layers, so the plain lines run."""
    want = Mlp()(X)
    with alone():
        mesh = init_device_mesh("cpu", (1,))
        model = Mlp()
        if fused_first:
            fuse(model)
        parallelize_module(model, mesh, {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()})
        fuse(model)
        with recorded_ops() as ran:
            assert_close(model(X), want, rtol=0, atol=0)
        assert ran == []
