"""Sharding by DTensors, and torch.distributed.checkpoint."""

import tempfile
import warnings

from torch import distributed
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.matrix.changed_modules import Recorded
from tests.matrix.fsdp1 import row, whole, wrapped
from tests.matrix.many_processes import plain_weights
from tests.matrix.runner import FIRST, REST, tool


def sharded(run, **options):
    fully_shard(run.model, mesh=init_device_mesh("cpu", (2,)))
    run.optimizer = run.drop_in.optimizer(run.model.parameters(), **options)


def gathered(run):
    return {name: it.full_tensor() for name, it in run.model.named_parameters()} | run.scaler_result()


@tool(like=plain_weights)
def fsdp2(run):
    sharded(run)
    run.steps()
    return gathered(run)


@tool(oracle=lambda run: run.record.replayed(run))
def tensor_parallel(run):
    """Grads are sums in another order here, so the oracle is an optimizer that gets the same grads."""
    parallelize_module(
        run.model,
        init_device_mesh("cpu", (2,)),
        {"first": ColwiseParallel(), "last": RowwiseParallel()},
    )
    run.parts = (0, 1)
    run.optimizer = run.drop_in.optimizer(run.model.parameters())
    run.record = Recorded(run.optimizer)
    run.steps()
    return run.record.result()


def resumed(run, wrap):
    """All processes write a checkpoint midway, and read it into new objects."""
    run.steps(FIRST)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        distributed.broadcast_object_list(folders := [folder], 0)
        model, optimizer = get_state_dict(run.model, run.optimizer)
        checkpoint.save({"model": model, "optimizer": optimizer}, checkpoint_id=folders[0])
        run.model = run.drop_in.network(seed=7)
        wrap(run)
        model, optimizer = get_state_dict(run.model, run.optimizer)
        checkpoint.load(loaded := {"model": model, "optimizer": optimizer}, checkpoint_id=folders[0])
        set_state_dict(run.model, run.optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        distributed.barrier()  # all have read
    run.steps(REST)


@tool()
def dcp_of_ddp(run):
    def wrap(run):
        run.model = DistributedDataParallel(run.model)
        run.optimizer = run.drop_in.optimizer(run.model.parameters())

    wrap(run)
    resumed(run, wrap)


def dcp_trained(run, uses_orig_params):
    wrapped(run, uses_orig_params)
    resumed(run, lambda run: wrapped(run, uses_orig_params))
    return whole(run)


row("dcp of fsdp1", dcp_trained, False)
row("dcp of fsdp1 orig params", dcp_trained, True)


@tool(like=plain_weights)
def dcp_of_fsdp2(run):
    sharded(run)
    resumed(run, sharded)
    return gathered(run)
