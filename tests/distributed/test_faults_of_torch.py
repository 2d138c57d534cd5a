"""Faults of torch's own classes that ours must not have. One function for each fault returns whether the given classes
show it. If this torch has mended a fault, its test is skipped after our classes have passed."""

import json
import math
import warnings
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import Shard, distribute_tensor

from mpkernels.amp import GradScaler
from mpkernels.optim import AdamW
from tests.distributed.sharding import WORLD, mesh_of, part_of
from tests.hard_grads import same_bits
from tests.networks import B16
from tests.processes import in_processes, spawn

fused = partial(torch.optim.AdamW, fused=True)


def make(placed, dtype=torch.float32):
    """Return a parameter of ones with a grad of threes. ``placed``: (mesh, placements), or None for a plain one."""
    values = torch.ones(8, 4, dtype=dtype), torch.full((8, 4), 3.0, dtype=dtype)
    param, grad = values if placed is None else (distribute_tensor(it, *placed) for it in values)
    param = nn.Parameter(param)
    param.grad = grad
    return param


def start(scaler):
    scaler = scaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    return scaler


def ranks_decide_differently(adamw, scaler, params, unscales=False):
    """Return whether processes take different steps when the grads of some hold an inf."""
    optimizer = adamw(params)
    if unscales:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    decisions = [None] * WORLD
    distributed.all_gather_object(decisions, (scaler.get_scale(), all(bool((part_of(it) == 1).all()) for it in params)))
    return set(decisions) != {(2.0, True)}


def an_inf_of_one_rank(adamw, scaler, rank, folder, unscales=False):
    """Under ShardedGradScaler, one process skips, and the others step."""
    param = make(None)
    param.grad[0, 0] = math.inf if rank == 0 else 3.0
    return ranks_decide_differently(adamw, start(ShardedGradScaler), [param], unscales)


def an_inf_of_one_rank_unscaled(adamw, scaler, rank, folder):
    """With unscale_, ShardedGradScaler raises: a shape doesn't fit."""
    try:
        return an_inf_of_one_rank(adamw, scaler, rank, folder, unscales=True)
    except RuntimeError:
        return True


def dtensors_beside_plain_parameters(adamw, scaler, rank, folder):
    """The scaler refuses the mixture."""
    params, scaler = [make((mesh_of("fsdp2"), [Shard(0)])), make(None)], start(scaler)
    try:
        scaler.unscale_(adamw(params))
    except RuntimeError:
        return True
    return any((part_of(param.grad) != 0.75).any().item() for param in params)


def two_meshes(adamw, scaler, rank, folder):
    """Only processes of the first grad's mesh learn of an inf."""
    mesh = mesh_of("two dimensions")
    params = [make((mesh["rows"], [Shard(0)])), make((mesh["columns"], [Shard(0)]))]
    if rank == 3:
        part_of(params[1].grad)[0, 0] = math.inf
    return ranks_decide_differently(adamw, start(scaler), params)


def a_step_after_one_out_of_memory(adamw, scaler, rank, folder):
    """The optimizer still has the scale of the failed step, and the next one divides by its square."""
    weights = []
    for fails in (True, False):
        param, fresh_scaler = make(None), start(scaler)
        optimizer = adamw([param], eps=1.0)
        if fails:
            hook = optimizer.register_step_pre_hook(mock.Mock(side_effect=torch.OutOfMemoryError))
            with pytest.raises(torch.OutOfMemoryError):
                fresh_scaler.step(optimizer)
            hook.remove()
        fresh_scaler.step(optimizer)
        weights.append(param)
    return not same_bits(*weights)


def trained_with_a_master(adamw, param, master):
    """Return the optimizer after a step. torch's keeps a master that the user puts into its state."""
    options = {"master": "fp32"} if issubclass(getattr(adamw, "func", adamw), AdamW) else {}
    optimizer = adamw([param], lr=1e-3, **options)
    optimizer.step()
    optimizer.state[param].setdefault("master", master)
    return optimizer


def loaded_master(adamw, param, master, folder=None):
    """Return the master before and after a torch.distributed.checkpoint; by state_dict alone if folder is None."""
    model = nn.Module()
    model.weight = param
    optimizer = trained_with_a_master(adamw, param, master)
    before = part_of(optimizer.state[param]["master"]).clone()
    if folder is None:
        optimizer.load_state_dict(optimizer.state_dict())
    else:
        dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=folder)
        dcp.load(saved := get_optimizer_state_dict(model, optimizer), checkpoint_id=folder)
        set_optimizer_state_dict(model, optimizer, saved)
    return before, part_of(optimizer.state[param]["master"])


def masters_are_rounded(adamw, scaler, rank, folder):
    """load_state_dict casts each state to its parameter's dtype, also at the end of torch.distributed.checkpoint."""
    param = make((mesh_of("fsdp2"), [Shard(0)]), B16)
    master = torch.full_like(param, 1 + 2**-20, dtype=torch.float32)
    pairs = [loaded_master(adamw, param, master, it) for it in (None, folder)]
    return not all(same_bits(*pair) for pair in pairs)


def masters_are_mixed_up(adamw, scaler, rank, folder):
    """torch.distributed.checkpoint saves a state that isn't a DTensor as one tensor for all processes."""
    param = nn.Parameter(distribute_tensor(torch.arange(8.0).to(B16), mesh_of("fsdp2"), [Shard(0)]))
    param.grad = torch.ones_like(param)
    before, after = loaded_master(adamw, param, part_of(param).float(), folder)
    mixed = [None] * WORLD
    distributed.all_gather_object(mixed, not torch.equal(before.to(B16), after.to(B16)))
    return any(mixed)


FAULTS = (
    *(an_inf_of_one_rank, an_inf_of_one_rank_unscaled, dtensors_beside_plain_parameters, two_meshes),
    *(a_step_after_one_out_of_memory, masters_are_rounded, masters_are_mixed_up),
)


def look_for_faults(folder, rank):
    warnings.simplefilter("ignore")
    faults_seen = {}
    for fault in FAULTS:
        for who, classes in {"ours": (AdamW, GradScaler), "torch's": (fused, torch.amp.GradScaler)}.items():
            faults_seen[f"{fault.__name__} {who}"] = fault(*classes, rank, folder / f"{fault.__name__} {who}")
            distributed.barrier()
    (folder / f"{rank}.json").write_text(json.dumps(faults_seen))


@pytest.fixture(scope="module")
def faults_seen(tmp_path_factory):
    """Return for each fault and side whether a process has seen the fault."""
    folder = tmp_path_factory.mktemp("faults")
    spawn(partial(look_for_faults, folder), folder, WORLD)
    reports = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]
    return {key: any(it[key] for it in reports) for key in reports[0]}


@in_processes
@pytest.mark.parametrize("fault", FAULTS, ids=lambda it: it.__name__)
def test_ours_lack_the_fault_of_torchs(faults_seen, fault):
    assert not faults_seen[f"{fault.__name__} ours"]
    if not faults_seen[f"{fault.__name__} torch's"]:
        pytest.skip("this torch has mended it")
