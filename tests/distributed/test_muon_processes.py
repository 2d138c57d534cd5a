"""Muon in several processes. Over FSDP2's DTensors each orthogonalizes some whole matrices; all train as one does."""

from copy import deepcopy
from functools import partial
from itertools import product
from unittest import mock

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from mpkernels.amp import GradScaler
from mpkernels.optim import Muon
from tests.distributed.counted import Counted
from tests.distributed.sharding import WORLD, mesh_of, network, shard, trained, wholes
from tests.distributed.test_masters_wrapper_fsdp2 import checkpoints_go_both_ways
from tests.hard_grads import same_bits
from tests.networks import B16
from tests.processes import in_processes, run_checks, spawn

F32, all_to_all = torch.float32, distributed.all_to_all_single


def make(params, **options):
    return Muon([it for it in params if it.ndim == 2], lr=1e-2, **options)


CASES = (
    *((F32, {}, False), (F32, {}, True), (F32, {"max_norm": 0.1}, False)),
    *((B16, {}, False), (B16, {"max_norm": 0.1, "master": "fp32", "state_dtype": B16}, True)),
)


def four_processes_train_as_one(rank):
    """Parts are uneven, and one matrix has fewer rows than there are processes."""
    for dtype, options, is_scaled in CASES:
        alone, model = network(dtype), shard(network(dtype), "fsdp2")
        scalers = [GradScaler("cpu", init_scale=64.0) if is_scaled else None for _ in range(2)]
        trained(alone, partial(make, guard=True, **options), scalers[0])
        trained(model, partial(make, **options), scalers[1], spoils=rank == 0)
        for a, b in zip(wholes(model), wholes(alone), strict=True):
            bound = (
                0 if "max_norm" not in options else 5 * 1e-2 * 2**-8 + (2**-8 * b.abs().max() if dtype == B16 else 0)
            )
            assert (a.float() - b.float()).abs().max() <= bound, (dtype, options, is_scaled)


def matrices(shapes, dim, dtype=F32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    mesh = mesh_of("fsdp2")
    parts = [distribute_tensor(it, mesh, [Shard(dim)], src_data_rank=None) for it in values]
    return [nn.Parameter(it) for it in values], [nn.Parameter(it) for it in parts]


def give(plain, parts, seed):
    generator = torch.Generator().manual_seed(seed)
    for a, b in zip(plain, parts, strict=True):
        a.grad = torch.randn(a.shape, generator=generator).to(a.dtype)
        b.grad = distribute_tensor(a.grad, b.device_mesh, b.placements, src_data_rank=None)


SHAPES = [(8, 8)] * 7 + [(3, 40)] * 2 + [(1, 5), (5, 1)] + [(9, 6)] * 5


def parts_of_rows_or_columns_step_as_wholes_do(rank):
    """Also where some have no grad, groups of one shape have other numbers, and 16-bit weights have 8-bit states."""
    for dim, dtype in product((0, 1), (F32, B16)):
        plain, parts = matrices(SHAPES, dim, dtype)
        optimizers = []
        for params in (plain, parts):
            groups = [{"params": params[::2]}, {"params": params[1::2], "momentum": 0.5, "ns_steps": 3}]
            optimizers.append(Muon(groups, lr=0.1, guard=True))
        for step in range(3):
            give(plain, parts, step)
            if step == 1:
                plain[3].grad = parts[3].grad = None
            for optimizer in optimizers:
                optimizer.step()
        for a, b in zip(plain, parts, strict=True):
            assert same_bits(a, b.full_tensor()), (dim, dtype, a.shape)


def parts_travel_once_to_their_owner_and_back(rank):
    """Each process sends its parts of the others' matrices in bf16, and as much comes back."""
    _, parts = matrices([(64, 64)] * 8, 0)
    give([nn.Parameter(torch.zeros(it.shape)) for it in parts], parts, 0)
    optimizer = Muon(parts)
    optimizer.step()
    with Counted() as counted, mock.patch.object(distributed, "all_to_all_single", wraps=all_to_all) as calls:
        optimizer.step()
    sent = [given.numel() * given.itemsize for (_, given, *_), _ in calls.call_args_list]
    assert sent == [8 * 64 * 64 * 2 // WORLD] * 2
    assert (counted.calls, counted.waits) == (1, 0)


def a_process_that_fails_leaves_no_other_waiting(rank):
    _, parts = matrices([(8, 8)] * 3, 0)
    give([nn.Parameter(torch.zeros(it.shape)) for it in parts], parts, 0)
    optimizer = Muon(parts)
    optimizer.step()
    before = [it.to_local().clone() for it in parts]
    if rank == 1:
        local = torch.zeros(2, 8, dtype=torch.float64)
        parts[0].grad = None
        parts[0].grad_dtype = None
        parts[0].grad = DTensor.from_local(local, parts[0].device_mesh, [Shard(0)])
    with pytest.raises((RuntimeError, TypeError), match="fp64" if rank == 1 else "failed in another process"):
        optimizer.step()
    assert all(map(same_bits, before, [it.to_local() for it in parts]))


def what_isnt_served_is_refused(rank):
    param = nn.Parameter(distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2, 2)), [Shard(0), Shard(1)]))
    param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match=r"^Muon: params must be sharded over one dimension of a mesh"):
        Muon([param]).step()
    _, parts = matrices([(8, 8)], 0)
    parts[0].grad = torch.ones_like(parts[0])
    with pytest.raises(ValueError, match=r"^Muon: guard must be None or True with sharded params, got False$"):
        Muon(parts, guard=False).step()
    distributed.barrier()


def under_ddp_all_step_by_the_mean_of_their_grads(rank):
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(5, 4, bias=False))
    model = DistributedDataParallel(deepcopy(alone))
    optimizers = [Muon(it.parameters(), lr=0.1, max_norm=0.5) for it in (alone, model)]
    for _ in range(3):
        batches = torch.randn(WORLD, 8, 6)  # the same in each process, by the seed
        for it, batch in ((alone, batches), (model, batches[rank])):
            it(batch).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for ours, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=0, atol=0.1 * 2**-5)  # updates are bf16
        first = ours.detach().clone()
        distributed.broadcast(first, 0)
        assert same_bits(first, ours.detach())


CHECKS = (
    *(four_processes_train_as_one, parts_of_rows_or_columns_step_as_wholes_do),
    *(parts_travel_once_to_their_owner_and_back, a_process_that_fails_leaves_no_other_waiting),
    *(what_isnt_served_is_refused, under_ddp_all_step_by_the_mean_of_their_grads),
    partial(checkpoints_go_both_ways, make=make),
)


@in_processes
def test_four_processes(tmp_path):
    spawn(partial(run_checks, CHECKS), tmp_path, WORLD)
