"""If hooks or a subclass's step need unscaled grads, an inf in one process makes all processes skip the step."""

import math
from contextlib import nullcontext
from functools import partial
from itertools import product
from unittest import mock

import pytest
import torch
from torch import distributed
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import Replicate, Shard

from mpkernels.amp import GradScaler, inf_check
from mpkernels.distributed.processes import Processes
from mpkernels.optim import AdamW
from tests.distributed.sharding import WORLD, mesh_of, part_of
from tests.distributed.test_meshes import params_on
from tests.distributed.test_processes import OURS, SHARDED, TORCHS, assert_parts_are_of_the_whole, trained
from tests.distributed.test_processes_of_torch import assert_same_weights, backward, network, sharded, spoil
from tests.hard_grads import same_bits
from tests.networks import B16
from tests.processes import in_processes, run_checks, spawn


def note_the_largest_grad(optimizer, *_):
    grads = [part_of(param.grad) for param in optimizer.param_groups[0]["params"] if param.grad is not None]
    optimizer.largest_grads.append(max((grad.abs().max().item() for grad in grads if grad.numel()), default=0.0))


class Looking(AdamW):
    def step(self, closure=None):
        note_the_largest_grad(self)
        return super().step(closure)


def looking(kind, params, **options):
    optimizer = kind(params, lr=0.1, **options)
    optimizer.largest_grads = []  # of each step that is taken
    if kind is AdamW:
        optimizer.register_step_pre_hook(note_the_largest_grad)
    return optimizer


class Replaces(GradScaler):
    def _check_inf_per_device(self, optimizer):
        return super()._check_inf_per_device(optimizer)


REPLACING = partial(Replaces, "cpu", init_scale=4.0, growth_interval=2)


def without_hooks(kind, params, **options):
    optimizer = kind(params, lr=0.1, **options)
    optimizer.largest_grads = []
    return optimizer


def ways_to_give_a_group():
    """The process_group may be given to the scaler or to the optimizer."""
    given = {"process_group": distributed.group.WORLD}
    return (
        (OURS, given, {"max_norm": 0.5}),
        (OURS, {}, {"max_norm": 0.5, **given}),
        (OURS, given, {}),
        (OURS, given, {"guard": True}),
        (REPLACING, given, {"max_norm": 0.5}),
        (TORCHS, {}, {"max_norm": 0.5, **given}),
        (TORCHS, {}, given),
        (SHARDED, {}, {"max_norm": 0.5, **given}),
        (SHARDED, given, {}),
    )


def unscale_first(scaler, optimizer):
    scaler.unscale_(optimizer)


def leave_scaled(scaler, optimizer):
    pass


def parts_skip_together(rank):
    """One of the processes has no grad. Squares are added up for the norm, as without hooks."""
    for scaler, scalers, options in ways_to_give_a_group():
        for kind in (AdamW, Looking):
            for before_step in (leave_scaled, unscale_first):
                made = []

                def make(params, kind=kind, made=made, **options):
                    made.append(looking(kind, params, **options))
                    return made[-1]

                parts = trained(rank, torch.float32, partial(make, **options), scaler(**scalers), before_step)
                alone = partial(make, **{key: it for key, it in options.items() if key != "process_group"})
                whole = trained(None, torch.float32, alone, (TORCHS if scaler is SHARDED else scaler)(), before_step)
                assert_parts_are_of_the_whole(rank, parts, whole)
                assert parts[1][::4] == [4.0, 2.0, 2.0, 4.0]  # the scale
                assert [len(it.largest_grads) for it in made] == [3, 3]
                assert all(largest <= 9 / 8 for it in made for largest in it.largest_grads)


def do_nothing(*_):
    pass


def halve(optimizer, *_):
    """Change the norm."""
    for param in optimizer.param_groups[0]["params"]:
        if param.grad is not None:
            param.grad.data.mul_(0.5)  # raises no version of the grad


def raise_memory_error(*_):
    raise MemoryError


def hooked(params, register, hook, is_hooked=True, **options):
    optimizer = AdamW(params, lr=0.1, **options)
    if is_hooked:
        register(optimizer, hook)
    return optimizer


PRE, POST = AdamW.register_step_pre_hook, AdamW.register_step_post_hook


def hooks_on_some_ranks_change_nothing(rank):
    """A rank may have a hook that writes a log. Processes exchange as often with hooks as without."""
    for scaler, scalers, options in ways_to_give_a_group():
        for before_step in (leave_scaled, unscale_first):
            ends, counts = [], []
            for register, hooked_ranks in ((POST, ()), (POST, (0,)), (PRE, (2,)), (PRE, (0, 1, 2))):
                make = partial(hooked, register=register, hook=do_nothing, is_hooked=rank in hooked_ranks, **options)
                with mock.patch.object(Processes, "agree", autospec=True, side_effect=Processes.agree) as agree:
                    params, outcomes = trained(rank, torch.float32, make, scaler(**scalers), before_step)
                ends.append((params, outcomes[::4], outcomes[2::4], outcomes[3::4]))
                counts.append(agree.call_count)
            assert 0 < counts[0] == counts[1] == counts[2]
            assert counts[3] - counts[0] == (3 if "max_norm" in options or "guard" in options else 0)  # steps taken
            for params, *outcomes in ends[1:]:
                assert all(map(same_bits, params, ends[0][0]))
                assert outcomes == list(ends[0][1:])


def max_norm_clips_what_hooks_leave(rank):
    """max_norm clips the grads as hooks have left them."""
    for scaler, scalers, options in ways_to_give_a_group():
        for before_step in (leave_scaled, unscale_first):
            alone = {key: it for key, it in options.items() if key != "process_group"}
            ends = [
                trained(who, torch.float32, partial(hooked, register=PRE, hook=halve, **given), kind(), before_step)
                for who, given, kind in (
                    (rank, options, partial(scaler, **scalers)),
                    (None, alone, TORCHS if scaler is SHARDED else scaler),
                )
            ]
            assert_parts_are_of_the_whole(rank, *ends)


def a_hook_that_changes_one_ranks_norm_is_refused(rank):
    given = {"process_group": distributed.group.WORLD}
    for kind in (GradScaler, torch.amp.GradScaler):
        params = [torch.nn.Parameter(torch.ones(3))]
        optimizer, scaler = hooked(params, PRE, halve, rank == 1, max_norm=0.5, **given), kind("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        params[0].grad = torch.full((3,), 6.0)
        with pytest.raises(RuntimeError, match="a hook has changed the grads") if rank == 1 else nullcontext():
            scaler.step(optimizer)
        assert (params[0].tolist() == [1.0] * 3) == (rank == 1)


def an_error_without_a_hook_leaves_a_second_try(rank):
    """The process with a hook has unscaled by then. At the second try all tell the same norm again. (torch's scaler
    leaves its scale on an optimizer that fails, and would hand over its square.)"""
    ends = []
    for fails in (False, True):
        params = [torch.nn.Parameter(torch.ones(3))]
        options = {"max_norm": 0.5, "process_group": distributed.group.WORLD}
        optimizer, scaler = hooked(params, PRE, do_nothing, rank == 1, **options), GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        params[0].grad = torch.full((3,), 6.0)
        if fails:
            with pytest.MonkeyPatch.context() as patch:
                if rank == 0:
                    patch.setattr(AdamW, "_plans_for", raise_memory_error)
                with pytest.raises(MemoryError if rank == 0 else RuntimeError):
                    scaler.step(optimizer)
        scaler.step(optimizer)
        scaler.update()
        ends.append((params[0].tolist(), optimizer.grad_norm.item()))
    assert ends[0] == ends[1]


def dtensors(rank):
    """There are several meshes. Processes skip even if they share no mesh with the process that finds an inf."""
    mesh = mesh_of("two dimensions")
    placed = (mesh["rows"], [Shard(0)]), (mesh["columns"], [Shard(0)]), (mesh, [Replicate(), Shard(1)])
    for scaler_kind in (GradScaler, torch.amp.GradScaler):
        for kind, make in ((AdamW, looking), (Looking, looking), (AdamW, looking if rank == 2 else without_hooks)):
            for param_places in (placed, [(mesh_of("fsdp2"), [Shard(1)])]):
                params = params_on(*param_places)
                optimizer, scaler = make(kind, params, max_norm=1e9), scaler_kind("cpu", init_scale=4.0)
                scaler.scale(torch.ones(()))
                if rank == 3:
                    part_of(params[-1].grad)[0, 0] = math.inf
                scaler.step(optimizer)
                scaler.update()
                assert (scaler.get_scale(), optimizer.largest_grads, optimizer.step_was_skipped.item()) == (2.0, [], 1)
                assert all((part_of(param) == 1).all() for param in params)
                for param in params:
                    param.grad.zero_().add_(3.0)
                scaler.step(optimizer)
                scaler.update()
                assert (scaler.get_scale(), optimizer.largest_grads) == (2.0, [1.5] if make is looking else [])
                assert all((part_of(param) < 1).all() for param in params)


def fsdp1(rank):
    """Hooks are in both processes, or in the first alone."""
    kinds = (torch.float32, ShardedGradScaler), (torch.float32, GradScaler), (B16, GradScaler)
    for (dtype, scaler_kind), hooked_ranks in product(kinds, ((0, 1), (0,))):
        whole, model = network(dtype), sharded(dtype)
        optimizers = [
            looking(AdamW, whole.parameters(), max_norm=0.5),
            (looking if rank in hooked_ranks else without_hooks)(AdamW, model.parameters(), max_norm=0.5),
        ]
        scalers = [kind("cpu", init_scale=4.0) for kind in (GradScaler, scaler_kind)]
        for step in range(3):
            for it, optimizer, scaler in zip((whole, model), optimizers, scalers, strict=True):
                optimizer.zero_grad()
                backward(it, dtype, scaler.scale(torch.ones(())))
                if step == 1 and (it is whole or rank == 1):
                    spoil(it)
                scaler.step(optimizer)
                scaler.update()
        assert [len(it.largest_grads) for it in optimizers] == [2, 2 * (rank in hooked_ranks)]
        assert [it.get_scale() for it in scalers] == [2.0, 2.0]
        assert_same_weights(model, whole)


def an_error_in_one_process_is_raised_by_all(rank):
    """If one process fails, all raise, and can try again."""
    given = {"process_group": distributed.group.WORLD}
    for scaler_kind in (GradScaler, torch.amp.GradScaler):
        params = [torch.nn.Parameter(torch.ones(3))]
        optimizer, scaler = looking(AdamW, params, **given), scaler_kind("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        params[0].grad = torch.full((3,), 6.0)
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(inf_check, "unscale_list_", raise_memory_error)
                patch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", raise_memory_error)
            with pytest.raises(MemoryError if rank == 1 else RuntimeError):
                scaler.step(optimizer)
        assert (params[0].tolist(), optimizer.largest_grads) == ([1.0] * 3, [])
        scaler.step(optimizer)
        scaler.update()
        assert (optimizer.largest_grads, scaler.get_scale()) == ([1.5], 4.0)
        assert (params[0] < 1).all()


CHECKS = (
    *(parts_skip_together, hooks_on_some_ranks_change_nothing),
    *(max_norm_clips_what_hooks_leave, a_hook_that_changes_one_ranks_norm_is_refused),
    *(an_error_in_one_process_is_raised_by_all, an_error_without_a_hook_leaves_a_second_try),
)


@in_processes
def test_three_processes(tmp_path):
    spawn(partial(run_checks, CHECKS), tmp_path, 3)


@in_processes
def test_processes_of_meshes(tmp_path):
    spawn(partial(run_checks, (dtensors,)), tmp_path, WORLD)


@in_processes
def test_processes_of_fsdp1(tmp_path):
    spawn(partial(run_checks, (fsdp1,)), tmp_path, 2)
