"""FSDP1 and ZeroRedundancyOptimizer give each process a part of the grads. AdamW detects it, and asks the others. The
matrix trains with them, skips and clips."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer

from mpkernels.optim import AdamW, Muon
from tests.hard_grads import same_bits
from tests.networks import B16
from tests.processes import in_processes, run_checks, spawn


def sharded(uses_orig_params=True):
    layers = nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 3))
    return FullyShardedDataParallel(layers, use_orig_params=uses_orig_params, device_id=torch.device("cpu"))


def release_is_refused(rank):
    for uses_orig_params in (False, True):
        optimizer = AdamW(sharded(uses_orig_params).parameters())
        with pytest.raises(ValueError, match=r"^AdamW.release_grads: params must not be FSDP's"):
            optimizer.release_grads()


def zero_trains_as_one_process(kind, rank):
    """There are more processes than parameters, so that one process has none."""
    for dtype, options in (
        (torch.float32, {"max_norm": 0.5}),
        (torch.float32, {}),
        (B16, {}),
        (B16, {"max_norm": 0.5, "master": "fp32"}),
        (B16, {"guard": False}),
    ):
        whole, parted = ([nn.Parameter(torch.ones(size, 1, dtype=dtype)) for size in (3, 4)] for _ in range(2))
        optimizer = kind(whole, lr=0.1, **options)
        zero_optimizer = ZeroRedundancyOptimizer(parted, optimizer_class=kind, lr=0.1, **options)
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


@in_processes
def test_fsdp1_refuses_to_release_grads(tmp_path):
    spawn(release_is_refused, tmp_path)


@in_processes
def test_zero_trains_clips_and_skips_as_one_process(tmp_path):
    spawn(partial(run_checks, [partial(zero_trains_as_one_process, kind) for kind in (AdamW, Muon)]), tmp_path, world=3)
