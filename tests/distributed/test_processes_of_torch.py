"""FSDP1 and ZeroRedundancyOptimizer give each process a part of the grads. AdamW detects it, and asks the others."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.optim import ZeroRedundancyOptimizer

from mpkernels.amp import GradScaler, clip_grad_norm_
from mpkernels.optim import AdamW
from tests.hard_grads import same_bits
from tests.networks import B16
from tests.processes import in_processes, run_checks, spawn

CPU, STEPS = torch.device("cpu"), 4


def network(dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 3)).to(dtype)


def sharded(dtype, uses_orig_params=True, strategy=ShardingStrategy.FULL_SHARD):
    options = {"use_orig_params": uses_orig_params, "device_id": CPU, "sharding_strategy": strategy}
    return FullyShardedDataParallel(network(dtype), **options)


def backward(model, dtype, scale=1.0):
    """Run the same backward in each process, so that the grads equal their mean."""
    loss = model(torch.linspace(-1, 1, 12).view(2, 6).to(dtype)).float().square().sum()
    (loss * scale).backward()


def spoil(model):
    """Set one element of this process's grads to inf."""
    next(param.grad for param in model.parameters() if param.grad is not None).view(-1)[-1] = math.inf


def trained(model, dtype, options, scaler, clips, spoils):
    optimizer, outcomes = AdamW(model.parameters(), lr=0.1, **options), []
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, dtype, 1.0 if scaler is None else scaler.scale(torch.ones(())))
        if step == 1 and spoils:
            spoil(model)
        if clips:
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 0.5)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
            outcomes.append(scaler.get_scale())
        norm = optimizer.grad_norm
        outcomes += [optimizer.skipped_steps.item(), 0.0 if norm is None or norm.isinf() else norm.item()]
    return outcomes


def fsdp1_trains_as_one_process(rank):
    ours, theirs, sharded_scaler = (
        partial(kind, "cpu", init_scale=4.0) for kind in (GradScaler, torch.amp.GradScaler, ShardedGradScaler)
    )
    for dtype, options, scaler, whole_scaler, clips in (
        (torch.float32, {"max_norm": 0.5}, None, None, False),
        (B16, {}, None, None, False),
        (B16, {"max_norm": 0.5, "master": "fp32"}, sharded_scaler, theirs, False),
        (torch.float32, {}, sharded_scaler, theirs, False),
        (torch.float32, {}, theirs, theirs, False),
        (torch.float32, {"guard": True}, ours, ours, False),
        (torch.float32, {}, ours, ours, True),
    ):
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
            for uses_orig_params in (False, True):
                has_all = strategy is ShardingStrategy.NO_SHARD
                whole, model = network(dtype), sharded(dtype, uses_orig_params, strategy)
                expected = trained(whole, dtype, options, whole_scaler and whole_scaler(), clips, True)
                outcomes = trained(model, dtype, options, scaler and scaler(), clips, has_all or rank == 1)
                assert outcomes == pytest.approx(expected, rel=1e-6)
                assert outcomes[-2] == 1  # step skipped
                assert_same_weights(model, whole)


def assert_same_weights(model, whole):
    """Only the coefficient of clipping may differ in last bits: it comes from a sum in another order."""
    flat = torch.cat([param.detach().flatten() for param in whole.parameters()])
    with FullyShardedDataParallel.summon_full_params(model):
        ours = torch.cat([param.detach().flatten() for param in model.parameters()])[: flat.numel()]
    torch.testing.assert_close(ours, flat, rtol=torch.finfo(flat.dtype).eps, atol=1e-6)


def whole_parameters_beside_fsdp1s_are_refused_for_a_norm_alone(rank):
    """Parameters outside FSDP1 are the same in all processes, so their squares count once. A skip is common to all."""
    for options, is_refused in (({"max_norm": 1.0}, True), ({"guard": True}, False), ({"guard": False}, False)):
        model, head = sharded(torch.float32), nn.Linear(3, 1)
        optimizer = AdamW([*model.parameters(), *head.parameters()], **options)
        head(model(torch.ones(2, 6))).sum().backward()
        if rank == 1:
            spoil(model)
        if is_refused:
            with pytest.raises(
                ValueError, match=r"^AdamW: params must be parts that FSDP .* of 1, and whole ones; leave"
            ):
                optimizer.step()
        else:
            optimizer.step()
            assert optimizer.skipped_steps is None or optimizer.skipped_steps.item() == 1


def release_is_refused(rank):
    for uses_orig_params in (False, True):
        optimizer = AdamW(sharded(torch.float32, uses_orig_params).parameters())
        with pytest.raises(ValueError, match=r"^AdamW.release_grads: params must not be FSDP's"):
            optimizer.release_grads()


def zero_trains_as_one_process(rank):
    """There are more processes than parameters, so that one process has none."""
    for dtype, options in (
        (torch.float32, {"max_norm": 0.5}),
        (torch.float32, {}),
        (B16, {}),
        (B16, {"max_norm": 0.5, "master": "fp32"}),
        (B16, {"guard": False}),
    ):
        whole, parted = ([nn.Parameter(torch.ones(size, dtype=dtype)) for size in (3, 4)] for _ in range(2))
        optimizer = AdamW(whole, lr=0.1, **options)
        zero_optimizer = ZeroRedundancyOptimizer(parted, optimizer_class=AdamW, lr=0.1, **options)
        for bad in (1.0, math.inf if options.get("guard") is None else 1.0, 2.0):
            for first, second in (whole, parted):
                first.grad, second.grad = torch.full_like(first, 3.0), torch.full_like(second, bad)
            if dtype == torch.float32 and not options and bad == math.inf:
                continue
            optimizer.step()
            zero_optimizer.step()
            inner = zero_optimizer.optim
            assert (inner._peers is None) == (optimizer.grad_norm is None)
            assert inner.grad_norm is None or same_bits(inner.grad_norm, optimizer.grad_norm)
            assert inner.grad_norm is None or same_bits(inner.skipped_steps, optimizer.skipped_steps)
        assert all(map(same_bits, parted, whole))


FSDP1 = (
    *(fsdp1_trains_as_one_process, release_is_refused),
    whole_parameters_beside_fsdp1s_are_refused_for_a_norm_alone,
)


@in_processes
def test_fsdp1_trains_clips_and_skips_as_one_process(tmp_path):
    spawn(partial(run_checks, FSDP1), tmp_path)


@in_processes
def test_zero_trains_clips_and_skips_as_one_process(tmp_path):
    spawn(zero_trains_as_one_process, tmp_path, world=3)
