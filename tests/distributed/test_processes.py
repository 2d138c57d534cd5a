"""process_group: grads divided among processes are clipped by one norm, and all processes skip a step, or none."""

import math
from functools import partial

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import mpkernels
from mpkernels.amp import GradScaler, accumulate, clip_grad_norm_
from mpkernels.optim import AdamW
from tests.hard_grads import same_bits
from tests.networks import B16, F16
from tests.processes import in_processes, run_checks, spawn

SIZES = (5, 33, 1, 40, 0, 17)  # rank 2 has only the empty one
INIT = {"init_scale": 4.0, "growth_interval": 2}
OURS, TORCHS, SHARDED = (partial(kind, "cpu", **INIT) for kind in (GradScaler, torch.amp.GradScaler, ShardedGradScaler))


def params_and_grads(dtype, steps=4, bad=1):
    """Return parameters and grads, whose squares add up without rounding in any order. In one step a grad is inf."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in SIZES]
    grads = [[torch.randint(-9, 9, (n,), generator=generator).to(dtype) / 8 for n in SIZES] for _ in range(steps)]
    grads[bad][1][-1] = math.inf
    return params, grads


def part_of(rank):
    """Return this rank's parameters. The process without a grad gets the last one, which no other has."""
    return {0: (0, 3), 1: (1, 2, 5), 2: (4,), None: range(len(SIZES))}[rank]


def trained(rank, dtype, make, scaler=None, before_step=lambda scaler, optimizer: None):
    """Train the rank's part, or all without a rank. Return the parameters, and each step's outcome."""
    params, grads = params_and_grads(dtype)
    mine = part_of(rank)
    optimizer, outcomes = make([params[i] for i in mine]), []
    for step_grads in grads:
        scale = 1 if scaler is None else scaler.scale(torch.ones(()))
        for i in mine:
            params[i].grad = None if SIZES[i] == 0 else step_grads[i] * scale
        if scaler is None:
            optimizer.step()
        else:
            before_step(scaler, optimizer)
            scaler.step(optimizer)
            scaler.update()
            outcomes.append(scaler.get_scale())
        outcomes += [getattr(optimizer, name, None) for name in ("grad_norm", "step_was_skipped", "skipped_steps")]
    return [params[i] for i in mine], [it.item() if isinstance(it, torch.Tensor) else it for it in outcomes]


def assert_parts_are_of_the_whole(rank, parts, whole):
    assert all(map(same_bits, parts[0], (whole[0][i] for i in part_of(rank))))
    assert parts[1] == whole[1]


def parts_step_as_the_whole(rank):
    group = distributed.group.WORLD
    kinds = (
        (torch.float32, {"max_norm": 0.5}),
        (torch.float32, {"guard": True}),
        (B16, {"master": "fp32", "max_norm": 0.5}),
        (F16, {"state_dtype": torch.int8}),
    )
    for kernel in mpkernels.backends("adamw_", "cpu"):  # native checks grads within the step, reference before it
        for dtype, options in kinds:
            make = partial(AdamW, lr=0.1, **options)
            with mpkernels.backend(kernel):
                parts, whole = trained(rank, dtype, partial(make, process_group=group)), trained(None, dtype, make)
            assert_parts_are_of_the_whole(rank, parts, whole)
            assert parts[1][-1] == 1  # a step was skipped


def parts_step_as_the_whole_under_scalers(rank):
    given = {"process_group": distributed.group.WORLD}
    adamw, clipping = partial(AdamW, lr=0.1), partial(AdamW, lr=0.1, max_norm=0.5)
    sgd, fused = partial(torch.optim.SGD, lr=0.1), partial(torch.optim.AdamW, lr=0.1, fused=True)
    for scaler, scalers, make, its in (
        (OURS, given, clipping, {}),
        (OURS, {}, clipping, given),
        (OURS, given, clipping, given),
        (OURS, given, adamw, {}),
        (OURS, given, sgd, {}),
        (OURS, given, fused, {}),
        (TORCHS, {}, clipping, given),
        (SHARDED, {}, clipping, given),
        (SHARDED, given, adamw, {}),
        (SHARDED, {}, adamw, {}),
    ):
        for before_step in (lambda scaler, optimizer: None, lambda scaler, optimizer: scaler.unscale_(optimizer)):
            parts = trained(rank, torch.float32, partial(make, **its), scaler(**scalers), before_step)
            alone = OURS if scaler is OURS else TORCHS
            assert_parts_are_of_the_whole(rank, parts, trained(None, torch.float32, make, alone(), before_step))
            assert parts[1][::4] == [4.0, 2.0, 2.0, 4.0]  # the scale


def clipped(rank, dtype, norm_type, **options):
    params, (grads, *_) = params_and_grads(dtype, bad=1)
    for i in part_of(rank):
        params[i].grad = None if SIZES[i] == 0 else grads[i]
    mine = [params[i] for i in part_of(rank)]
    norm = clip_grad_norm_(mine, 0.5, norm_type, **options)
    return norm, [param.grad for param in mine]


def parts_are_clipped_as_the_whole(rank):
    given = {"process_group": distributed.group.WORLD}
    for dtype in (torch.float32, B16):
        for norm_type in (2, 1, 3, math.inf):
            (norm, grads), whole = clipped(rank, dtype, norm_type, **given), clipped(None, dtype, norm_type)
            if norm_type == 3:  # a sum of roots' powers
                torch.testing.assert_close(norm, whole[0], rtol=2**-23, atol=0)
                continue
            assert same_bits(norm, whole[0])
            theirs = [whole[1][i] for i in part_of(rank)]
            assert all(a is b or same_bits(a, b) for a, b in zip(grads, theirs, strict=True))


def accumulate_clips_by_the_group(rank):
    """Clipping uses the process_group of AdamW or of the scaler."""
    group, weights = distributed.group.WORLD, []
    for adamws, scalers in ((group, None), (None, group)):
        param = nn.Parameter(torch.ones(3 + rank))
        optimizer = torch.optim.SGD([param], lr=1.0) if adamws is None else AdamW([param], process_group=adamws)
        scaler = GradScaler("cpu", init_scale=2.0, process_group=scalers)
        for micro in accumulate([3.0], 1, optimizer, scaler=scaler, max_norm=1.0):
            micro.backward(param.sum() * micro.batch)
        weights.append(param)
    assert (1 - weights[1]).detach().tolist() == pytest.approx([1 / 12**0.5] * (3 + rank))


CHECKS = (
    *(parts_step_as_the_whole, parts_step_as_the_whole_under_scalers),
    *(parts_are_clipped_as_the_whole, accumulate_clips_by_the_group),
)


@in_processes
def test_parts_are_trained_as_the_whole(tmp_path):
    spawn(partial(run_checks, CHECKS), tmp_path, world=3)
