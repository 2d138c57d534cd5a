"""If hooks or a subclass's step need unscaled grads, an inf in one process makes all processes skip the step."""

from contextlib import nullcontext
from functools import partial
from itertools import product

import pytest
import torch
from torch import distributed

from mpkernels.amp import GradScaler, inf_check
from mpkernels.optim import AdamW
from tests.distributed.test_processes import INIT, OURS, SHARDED, TORCHS, assert_parts_are_of_the_whole, trained
from tests.distributed.test_who_decides import Replaces
from tests.processes import in_processes, run_checks, spawn

largest_grads = []  # of each step that is taken


def note_the_largest_grad(optimizer, *_):
    grads = [param.grad for param in optimizer.param_groups[0]["params"] if param.grad is not None]
    largest_grads.append(max((grad.abs().max().item() for grad in grads if grad.numel()), default=0.0))


class Looking(AdamW):
    def step(self, closure=None):
        note_the_largest_grad(self)
        return super().step(closure)


def do_nothing(*_):
    pass


def halve(optimizer, *_):
    """Change the norm."""
    for param in optimizer.param_groups[0]["params"]:
        if param.grad is not None:
            param.grad.data.mul_(0.5)  # raises no version of the grad


def raise_memory_error(*_):
    raise MemoryError


PRE, POST, ALL = AdamW.register_step_pre_hook, AdamW.register_step_post_hook, (0, 1, 2)
HOOKS = (  # and the ranks that have it: one may write a log
    *((PRE, note_the_largest_grad, ALL), (None, Looking, ALL), (PRE, halve, ALL)),
    *((POST, do_nothing, (0,)), (PRE, do_nothing, (2,))),
)


def hooked(params, register, hook, is_hooked=True, **options):
    if register is None:
        return hook(params, lr=0.1, **options)
    optimizer = AdamW(params, lr=0.1, **options)
    if is_hooked:
        register(optimizer, hook)
    return optimizer


def ways_to_give_a_group():
    """The process_group may be given to the scaler or to the optimizer."""
    given, replacing = {"process_group": distributed.group.WORLD}, partial(Replaces, "cpu", **INIT)
    return (
        (OURS, given, {"max_norm": 0.5}),
        (OURS, {}, {"max_norm": 0.5, **given}),
        (OURS, given, {}),
        (OURS, given, {"guard": True}),
        (replacing, given, {"max_norm": 0.5}),
        (TORCHS, {}, {"max_norm": 0.5, **given}),
        (TORCHS, {}, given),
        (SHARDED, {}, {"max_norm": 0.5, **given}),
        (SHARDED, given, {}),
    )


def unscale_first(scaler, optimizer):
    scaler.unscale_(optimizer)


def parts_step_as_the_whole(rank):
    """Hooks see unscaled grads, in steps that are taken, and what they change is clipped. One process has no grad."""
    ways = product(ways_to_give_a_group(), HOOKS, (do_nothing, unscale_first))
    for (scaler, scalers, options), (register, hook, ranks), before_step in ways:
        make = partial(hooked, register=register, hook=hook, is_hooked=rank in ranks)
        alone = partial(make, **{key: it for key, it in options.items() if key != "process_group"})
        largest_grads.clear()
        parts = trained(rank, torch.float32, partial(make, **options), scaler(**scalers), before_step)
        whole = trained(None, torch.float32, alone, (TORCHS if scaler is SHARDED else scaler)(), before_step)
        assert_parts_are_of_the_whole(rank, parts, whole)
        assert parts[1][::4] == [4.0, 2.0, 2.0, 4.0]  # the scale
        assert len(largest_grads) == (6 if hook in (note_the_largest_grad, Looking) else 0)
        assert all(it <= 9 / 8 for it in largest_grads)


def given_a_grad(scaler_kind, register, hook, is_hooked, **options):
    """Return a parameter with a scaled grad, its optimizer and its scaler."""
    param, scaler = torch.nn.Parameter(torch.ones(3)), scaler_kind("cpu", init_scale=4.0)
    optimizer = hooked([param], register, hook, is_hooked, process_group=distributed.group.WORLD, **options)
    param.grad = scaler.scale(torch.full((3,), 1.5))
    return param, optimizer, scaler


def a_hook_that_changes_one_ranks_norm_is_refused(rank):
    for kind in (GradScaler, torch.amp.GradScaler):
        param, optimizer, scaler = given_a_grad(kind, PRE, halve, rank == 1, max_norm=0.5)
        with pytest.raises(RuntimeError, match="a hook has changed the grads") if rank == 1 else nullcontext():
            scaler.step(optimizer)
        assert (param.tolist() == [1.0] * 3) == (rank == 1)


def an_error_without_a_hook_leaves_a_second_try(rank):
    """The process with a hook has unscaled by then. At the second try all tell the same norm again. (torch's scaler
    leaves its scale on an optimizer that fails, and would hand over its square.)"""
    ends = []
    for fails in (False, True):
        param, optimizer, scaler = given_a_grad(GradScaler, PRE, do_nothing, rank == 1, max_norm=0.5)
        if fails:
            with pytest.MonkeyPatch.context() as patch:
                if rank == 0:
                    patch.setattr(AdamW, "_plans_for", raise_memory_error)
                with pytest.raises(MemoryError if rank == 0 else RuntimeError):
                    scaler.step(optimizer)
        scaler.step(optimizer)
        scaler.update()
        ends.append((param.tolist(), optimizer.grad_norm.item()))
    assert ends[0] == ends[1]


def an_error_in_one_process_is_raised_by_all(rank):
    """All can try again."""
    for kind in (GradScaler, torch.amp.GradScaler):
        param, optimizer, scaler = given_a_grad(kind, PRE, note_the_largest_grad, True)
        largest_grads.clear()
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(inf_check, "unscale_list_", raise_memory_error)
                patch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", raise_memory_error)
            with pytest.raises(MemoryError if rank == 1 else RuntimeError):
                scaler.step(optimizer)
        assert (param.tolist(), largest_grads) == ([1.0] * 3, [])
        scaler.step(optimizer)
        scaler.update()
        assert (largest_grads, scaler.get_scale()) == ([1.5], 4.0)
        assert (param < 1).all()


CHECKS = (
    *(parts_step_as_the_whole, a_hook_that_changes_one_ranks_norm_is_refused),
    *(an_error_in_one_process_is_raised_by_all, an_error_without_a_hook_leaves_a_second_try),
)


@in_processes
def test_three_processes(tmp_path):
    spawn(partial(run_checks, CHECKS), tmp_path, 3)
