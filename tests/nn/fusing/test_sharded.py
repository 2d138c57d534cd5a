"""Fused models compute the same under FSDP2, DDP and tensor parallelism, whether fuse comes before or after these."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from mpkernels.nn import fuse, unfuse
from tests.nn.fusing.feed_forwards import KINDS, made
from tests.nn.fusing.models import Chain, Mlp, X, assert_computes, recorded_ops
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


def two_modules():
    return nn.Sequential(Mlp(), Chain())


def by_fsdp2(model):
    mesh = init_device_mesh("cpu", (1,))
    for module in (*(model if isinstance(model, nn.Sequential) and isinstance(model[0], Mlp) else ()), model):
        fully_shard(module, mesh=mesh)
    return model


MODELS = {"two modules": (two_modules, ["mlp", "mlp"])}
MODELS |= {name: (partial(made, name), [op]) for name, (_, op) in KINDS.items()}
NAMES = ["two modules", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in KINDS)]
either_first = pytest.mark.parametrize("fused_first", [True, False], ids=["fused first", "fused last"])


@needs_gloo
@pytest.mark.filterwarnings("ignore")  # DDP's own, and FSDP2's, of plain models, too: Linear returns a view
@either_first
@pytest.mark.parametrize("wrap", [by_fsdp2, partial(DistributedDataParallel, find_unused_parameters=True)])
@pytest.mark.parametrize("name", NAMES)
def test_a_fused_model_trains(name, wrap, fused_first):
    make, ops = MODELS[name]
    want = losses(make())
    with alone():
        model = make()
        if fused_first:
            fuse(model)
        model = wrap(model)
        names = [type(it).__name__ for it in model.modules()]
        assert len(fuse(model).fused) == len(ops)
        assert [type(it).__name__ for it in model.modules()] == names
        with recorded_ops() as ran:
            assert losses(model) == pytest.approx(want, rel=1e-5)
        assert ran == 3 * ops
        unfuse(model)
        assert [type(it).__name__ for it in model.modules()] == names
        with recorded_ops() as ran:
            losses(model)
        assert ran == []


@needs_gloo
@either_first
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
        assert_computes(model, want, [])
