"""mpkernels.checkpoint saves what every process holds whole, and refuses parts: all processes write the same file."""

import warnings
from functools import partial

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from mpkernels import checkpoint
from mpkernels.optim import AdamW
from tests.distributed.sharding import network, shard
from tests.hard_grads import same_bits
from tests.processes import in_processes, spawn


@in_processes
def test_parts_are_refused_and_replicas_saved(tmp_path):
    spawn(partial(save_each_kind, tmp_path), tmp_path)


def save_each_kind(folder, rank):
    path = folder / f"{rank}.pt"
    replica = network()
    checkpoint.save(path, model=DistributedDataParallel(replica), optimizer=stepped(replica))
    saved = path.read_bytes()
    for name, value in parts():
        with pytest.raises(ValueError, match=f"checkpoint.save: {name} must lie in this process whole, got a part"):
            checkpoint.save(path, **{name: value})
        assert path.read_bytes() == saved
    other = network(seed=1)
    checkpoint.load(path, model=DistributedDataParallel(other))
    assert all(map(same_bits, replica.parameters(), other.parameters()))


def parts():
    warnings.simplefilter("ignore", FutureWarning)  # FSDP1 is deprecated
    model = shard(network(), "fsdp2")
    yield "model", model
    yield "optimizer", stepped(model)
    yield "nested", [{"weight": model[0].weight.detach()}]
    yield "fsdp1", stepped(FullyShardedDataParallel(network(), device_id=torch.device("cpu")))


def stepped(model):
    optimizer = AdamW(model.parameters())
    model(torch.ones(4, 20)).sum().backward()
    optimizer.step()
    return optimizer
