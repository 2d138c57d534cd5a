"""process_group in a single process: what is refused, copied and compiled."""

import copy
import math
import pickle
from functools import partial
from itertools import product

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from benchmarks.many_gpus import among
from mpkernels.amp import GradScaler, clip_grad_norm_
from mpkernels.distributed import fsdp1
from mpkernels.distributed.processes import Processes
from mpkernels.optim import AdamW
from tests.hard_grads import same_bits
from tests.processes import alone, needs_gloo


@pytest.mark.parametrize("bad", [0, "world", object()])
@pytest.mark.parametrize(
    "make", [lambda **its: AdamW([torch.ones(1)], **its), GradScaler, partial(clip_grad_norm_, [], 1)]
)
def test_what_is_no_process_group_is_refused(make, bad):
    with pytest.raises(TypeError, match=r"^\w+: process_group must be a torch.distributed.ProcessGroup or None, got "):
        make(process_group=bad)


@needs_gloo
def test_copies_share_the_group_and_pickles_are_refused():
    with alone() as group:
        for it in (AdamW([torch.ones(2, requires_grad=True)], process_group=group), GradScaler(process_group=group)):
            assert copy.deepcopy(it)._peers.group is group
            with pytest.raises(TypeError, match=r"process_group can't be pickled: save state_dict\(\)"):
                pickle.dumps(it)


@needs_gloo
def test_all_skip_if_one_has_failed():
    """On a GPU, where no host waits for an error in another process, skipping keeps the weights unchanged."""
    with alone() as group:
        for found_inf, has_failed in product((None, 0.0, 1.0), (False, True)):
            sumsq, skips, failed, _ = Processes(group).agree([torch.ones(1)], torch.tensor(2.0), found_inf, has_failed)
            assert (sumsq.item(), failed.item()) == (2.0, float(has_failed))
            assert skips.item() == float(bool(found_inf) or has_failed)  # at most 1: torch's optimizers step if it is 2


def test_parts_of_fsdp1_beside_whole_parameters_are_refused_for_a_norm_alone(monkeypatch):
    part, whole = torch.ones(2), torch.ones(2)
    part._fsdp_flattened = True
    monkeypatch.setattr(fsdp1, "are_several", lambda: True)
    monkeypatch.setattr(fsdp1, "_known_groups", lambda: {id(part): "the group"})
    for params in ([part], [part, whole]):
        peers = fsdp1.peers_of("it", params)
        assert (peers.group, peers.holds_parts) == ("the group", len(params) == 1)
    with pytest.raises(ValueError, match=r"^it: params must be parts .* those of 1, and whole ones; leave out max"):
        fsdp1.peers_of("it", [part, whole], for_norm=True)


@needs_gloo
def test_two_groups_are_refused():
    with alone() as group:
        param, other = torch.ones(2, requires_grad=True), distributed.new_group()
        optimizer, scaler = AdamW([param], process_group=group), GradScaler("cpu", process_group=other)
        scaler.scale(param.sum()).backward()
        for refuse in (scaler.step, scaler.unscale_):
            with pytest.raises(ValueError, match=r"^GradScaler: process_group must be that of the optimizer"):
                refuse(optimizer)


@needs_gloo
def test_differentiable_steps_take_no_group():
    with (
        alone() as group,
        pytest.raises(ValueError, match="differentiable=True is torch's own step, without process_group"),
    ):
        AdamW([torch.ones(2, requires_grad=True)], differentiable=True, process_group=group)


@pytest.mark.exhaustive
@needs_gloo
def test_compiled_steps_have_no_graph_break():
    with alone() as group:
        params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
        optimizers = [AdamW([param], lr=0.1, max_norm=0.5, process_group=group) for param in params]
        steps = torch.compile(optimizers[0].step, fullgraph=True, backend="aot_eager"), optimizers[1].step
        for grad in (1.0, math.inf, 2.0):
            for param, step in zip(params, steps, strict=True):
                param.grad = torch.full((3,), grad)
                step()
        assert same_bits(*params)


def interrupt(*_):
    raise KeyboardInterrupt


@needs_gloo
@pytest.mark.parametrize("next_is_scaled", [True, False])
@pytest.mark.parametrize("kind", [torch.amp.GradScaler, GradScaler], ids=lambda it: it.__module__)
def test_a_verdict_for_a_step_that_a_hook_stops_serves_no_other_step(kind, next_is_scaled):
    with alone() as group:
        param = nn.Parameter(torch.ones(2))
        optimizer, scaler = AdamW([param], process_group=group), kind("cpu", init_scale=4.0)
        hook = optimizer.register_step_pre_hook(interrupt)
        scaler.scale(param.sum()).backward()
        with pytest.raises(KeyboardInterrupt):
            scaler.step(optimizer)
        for name in ("grad_scale", "found_inf"):  # torch's scaler leaves them there
            vars(optimizer).pop(name, None)
        hook.remove()
        scaler.update()
        param.grad.fill_(math.inf)
        if next_is_scaled:
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == 2.0
        else:
            optimizer.step()
    assert (param.tolist(), optimizer.skipped_steps) == ([1.0, 1.0], 1)


@needs_gloo
def test_a_verdict_for_a_hook_serves_that_step_alone():
    with alone() as group:
        param = nn.Parameter(torch.ones(2))
        optimizer, scaler = AdamW([param], max_norm=1.0, process_group=group), torch.amp.GradScaler("cpu")
        hook = optimizer.register_step_post_hook(lambda *_: None)
        for factor in (1.0, math.inf):
            optimizer.zero_grad()
            scaler.scale(param * factor).sum().backward()
            scaler.step(optimizer)
            scaler.update()
            hook.remove()
        assert optimizer.skipped_steps == 1


def spoil(param, *_):
    param.grad.fill_(math.inf)


@needs_gloo
@pytest.mark.parametrize("kind", [torch.amp.GradScaler, GradScaler])
def test_a_scaler_learns_of_an_inf_that_a_hook_makes(kind):
    with alone() as group:
        param = nn.Parameter(torch.ones(2))
        optimizer, scaler = AdamW([param], max_norm=1.0, process_group=group), kind("cpu", init_scale=8.0)
        optimizer.register_step_pre_hook(partial(spoil, param))
        scaler.scale(param.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert (scaler.get_scale(), optimizer.skipped_steps) == (4.0, 1)


@needs_gloo
def test_a_second_try_sends_the_scaled_norm_again(monkeypatch):
    """Processes without a hook need no second try. Their norms have the scale in them."""
    sent, agree = [], Processes.agree

    def spy(processes, params, total_sumsq, *rest, **others):
        sent.append(float(total_sumsq))
        return agree(processes, params, total_sumsq, *rest, **others)

    monkeypatch.setattr(Processes, "agree", spy)
    with alone() as group:
        param = nn.Parameter(torch.ones(2))
        optimizer = AdamW([param], max_norm=1.0, process_group=group)
        scaler = GradScaler("cpu", init_scale=8.0)
        scaler.scale(param.sum()).backward()
        hook = optimizer.register_step_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            scaler.step(optimizer)
        hook.remove()
        optimizer.register_step_post_hook(lambda *_: None)
        scaler.step(optimizer)
    assert sent == [2 * 8.0**2] * 2


def test_under_torchs_sharded_scaler_each_process_clips_by_its_own_norm(monkeypatch):
    """The processes skip together, but each has all grads, as under DistributedDataParallel."""

    def norm():
        monkeypatch.setattr(
            distributed, "all_reduce", lambda tensor, *_, **__: tensor.mul_(2)
        )  # the other has the same
        param = nn.Parameter(torch.ones(2))
        optimizer, scaler = AdamW([param], max_norm=1.0), ShardedGradScaler("cpu", init_scale=8.0)
        scaler.scale(param.sum()).backward()
        scaler.step(optimizer)
        return optimizer.grad_norm.item()

    assert among(2, norm) == pytest.approx(2**0.5)
