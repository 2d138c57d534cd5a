"""Where hooks or a subclass's step have the grads unscaled first, an inf of one process costs all of them the step."""

import math
from functools import partial

import pytest
import torch
from torch import distributed
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import Replicate, Shard

from mpkernels.amp import GradScaler, inf_check
from mpkernels.optim import AdamW
from tests.distributed.sharding import WORLD, mesh_of, part_of
from tests.distributed.test_meshes import params_on
from tests.distributed.test_processes import OURS, SHARDED, TORCHS, assert_parts_are_of_the_whole, trained
from tests.distributed.test_processes_of_torch import assert_same_weights, backward, network, sharded, spoil
from tests.networks import B16
from tests.processes import each, needs_gloo, spawn


def look(optimizer, *_):
    grads = [part_of(param.grad) for param in optimizer.param_groups[0]["params"] if param.grad is not None]
    optimizer.seen.append(max((grad.abs().max().item() for grad in grads if grad.numel()), default=0.0))


class Looks(AdamW):
    def step(self, closure=None):
        look(self)
        return super().step(closure)


def looking(kind, params, **options):
    optimizer = kind(params, lr=0.1, **options)
    optimizer.seen = []  # of each step that is taken, the largest grad
    if kind is AdamW:
        optimizer.register_step_pre_hook(look)
    return optimizer


def parts_of_a_group(rank):
    """One of the processes has no grad. Squares are added up for the norm, as without hooks."""
    given = {"process_group": distributed.group.WORLD}
    for scaler, scalers, options in (
        (OURS, given, {"max_norm": 0.5}),
        (OURS, {}, {"max_norm": 0.5, **given}),
        (OURS, given, {}),
        (TORCHS, {}, {"max_norm": 0.5, **given}),
        (TORCHS, {}, given),
        (SHARDED, {}, {"max_norm": 0.5, **given}),
        (SHARDED, given, {}),
    ):
        for kind in (AdamW, Looks):
            for unscales in (False, True):
                made = []

                def make(params, kind=kind, made=made, **options):
                    made.append(looking(kind, params, **options))
                    return made[-1]

                def before_step(scaler, optimizer, unscales=unscales):
                    if unscales:
                        scaler.unscale_(optimizer)

                parts = trained(rank, torch.float32, partial(make, **options), scaler(**scalers), before_step)
                alone = partial(make, **{key: it for key, it in options.items() if key == "max_norm"})
                whole = trained(None, torch.float32, alone, (OURS if scaler is OURS else TORCHS)(), before_step)
                assert_parts_are_of_the_whole(rank, parts, whole)
                assert parts[1][::4] == [4.0, 2.0, 2.0, 4.0]  # the scale
                assert [len(it.seen) for it in made] == [3, 3]
                assert all(largest <= 9 / 8 for it in made for largest in it.seen)


def dtensors(rank):
    """Of several meshes. Processes that share none with the one that finds an inf skip with it."""
    mesh = mesh_of("two dimensions")
    placed = (mesh["rows"], [Shard(0)]), (mesh["columns"], [Shard(0)]), (mesh, [Replicate(), Shard(1)])
    for scaler_kind in (GradScaler, torch.amp.GradScaler):
        for kind in (AdamW, Looks):
            for of_params in (placed, [(mesh_of("fsdp2"), [Shard(1)])]):
                params = params_on(*of_params)
                optimizer, scaler = looking(kind, params), scaler_kind("cpu", init_scale=4.0)
                scaler.scale(torch.ones(()))
                if rank == 3:
                    part_of(params[-1].grad)[0, 0] = math.inf
                scaler.step(optimizer)
                scaler.update()
                assert (scaler.get_scale(), optimizer.seen, optimizer.step_was_skipped.item()) == (2.0, [], 1)
                assert all((part_of(param) == 1).all() for param in params)
                for param in params:
                    param.grad.zero_().add_(3.0)
                scaler.step(optimizer)
                scaler.update()
                assert (scaler.get_scale(), optimizer.seen) == (2.0, [1.5])
                assert all((part_of(param) < 1).all() for param in params)


def fsdp1(rank):
    for dtype, scaler_kind in ((torch.float32, ShardedGradScaler), (torch.float32, GradScaler), (B16, GradScaler)):
        whole, model = network(dtype), sharded(dtype)
        optimizers = [looking(AdamW, it.parameters(), max_norm=0.5) for it in (whole, model)]
        scalers = [kind("cpu", init_scale=4.0) for kind in (GradScaler, scaler_kind)]
        for step in range(3):
            for it, optimizer, scaler in zip((whole, model), optimizers, scalers, strict=True):
                optimizer.zero_grad()
                backward(it, dtype, scaler.scale(torch.ones(())))
                if step == 1 and (it is whole or rank == 1):
                    spoil(it)
                scaler.step(optimizer)
                scaler.update()
        assert [len(it.seen) for it in optimizers] == [2, 2]
        assert [it.get_scale() for it in scalers] == [2.0, 2.0]
        assert_same_weights(model, whole)


def an_error_in_one_process(rank):
    """All raise, and can try again."""
    given = {"process_group": distributed.group.WORLD}
    for scaler_kind in (GradScaler, torch.amp.GradScaler):
        params = [torch.nn.Parameter(torch.ones(3))]
        optimizer, scaler = looking(AdamW, params, **given), scaler_kind("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        params[0].grad = torch.full((3,), 6.0)
        with pytest.MonkeyPatch.context() as patch:

            def fail(*_):
                raise MemoryError

            if rank == 1:
                patch.setattr(inf_check, "unscale_list_", fail)
                patch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", fail)
            with pytest.raises(MemoryError if rank == 1 else RuntimeError):
                scaler.step(optimizer)
        assert (params[0].tolist(), optimizer.seen) == ([1.0] * 3, [])
        scaler.step(optimizer)
        scaler.update()
        assert (optimizer.seen, scaler.get_scale()) == ([1.5], 4.0)
        assert (params[0] < 1).all()


CHECKS = parts_of_a_group, an_error_in_one_process


@needs_gloo
def test_three_processes(tmp_path):
    spawn(partial(each, CHECKS), tmp_path, 3)


@needs_gloo
def test_processes_of_meshes(tmp_path):
    spawn(partial(each, (dtensors,)), tmp_path, WORLD)


@needs_gloo
def test_processes_of_fsdp1(tmp_path):
    spawn(partial(each, (fsdp1,)), tmp_path, 2)
