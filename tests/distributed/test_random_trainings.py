"""Random trainings: all processes decide alike, and like a single process that has all parameters."""

import math
import random

import pytest
import torch
from torch import distributed, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from mpkernels.amp import GradScaler
from mpkernels.optim import AdamW
from tests.distributed.sharding import WORLD, mesh_of, part_of, whole
from tests.hard_grads import same_bits
from tests.networks import B16
from tests.processes import in_processes, spawn

SCHEDULES, STEPS = 200, 5
SHAPES = (6, 5), (3,), (9, 2), (4, 4), (7,)


def placements():
    two = mesh_of("two dimensions")
    return (
        (mesh_of("fsdp2"), [Shard(0)]),
        (mesh_of("fsdp2"), [Shard(0)]),
        (two, [Replicate(), Shard(0)]),
        (two["columns"], [Shard(1)]),
        None,
    )


def parameters(dtype, generator, placed):
    """Return the parameters as DTensors, and as whole tensors."""
    values = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    return [nn.Parameter(_place(it, where)) for it, where in zip(values, placed, strict=True)], [
        nn.Parameter(it.clone()) for it in values
    ]


def _place(value, where):
    return value.clone() if where is None else distribute_tensor(value, *where, src_data_rank=None)


def take(params, grads, placed, scaler, micro_batches):
    """Give each parameter the sum of several grads. Plain tensors are summed, which is much faster than DTensors."""
    scaler.scale(torch.ones(()))
    scale = scaler.get_scale() if scaler.is_enabled() else 1.0
    for param, grad, where in zip(params, grads, placed, strict=True):
        param.grad = None if grad is None else _place(sum([grad * scale] * micro_batches), where)


def one_schedule(seed, rank, placed):
    """Train at random: with an inf in some step, parameter and place, a process without grads, frozen and unused
    parameters, and sums of several grads. Return what the process has decided."""
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype = chance.choice((torch.float32, B16))
    options = {"max_norm": chance.choice((None, 0.5)), "master": chance.choice(("split", "fp32"))}
    if dtype == torch.float32 and chance.random() < 0.5:
        options["guard"] = True
    ours, alone = parameters(dtype, generator, placed)
    frozen, unused = chance.randrange(8), chance.randrange(8)
    idle_rank, idle_step = chance.randrange(2 * WORLD), chance.randrange(STEPS)
    is_scaled, micro_batches = chance.random() < 0.5, chance.choice((1, 2))
    bad = {
        chance.randrange(STEPS): (chance.randrange(len(SHAPES)), chance.random()) for _ in range(chance.randrange(3))
    }
    sides = []
    for params in (ours, alone):
        scaler = GradScaler("cpu", init_scale=64.0, growth_interval=2, enabled=is_scaled)
        sides.append((params, AdamW(params, lr=0.05, **options), scaler))
    if frozen < len(SHAPES):
        for params, *_ in sides:
            params[frozen].requires_grad_(False)
    for step in range(STEPS):
        grads = [torch.randint(-9, 10, shape, generator=generator).to(dtype) / 8 for shape in SHAPES]
        if step in bad:
            grads[bad[step][0]].view(-1)[int(bad[step][1] * grads[bad[step][0]].numel())] = math.inf
        for i in {frozen, unused} & set(range(len(SHAPES))):
            grads[i] = None
        is_idle = rank == idle_rank and step == idle_step
        mine = [None] * len(SHAPES) if is_idle else grads
        for (params, optimizer, scaler), grads_and_places in zip(
            sides, ((mine, placed), (grads, [None] * len(SHAPES))), strict=True
        ):
            take(params, *grads_and_places, scaler, micro_batches)
            scaler.step(optimizer)
            scaler.update()
    (_, optimizer, scaler), (_, lonely, _) = sides
    decided = scaler.get_scale(), None if optimizer.skipped_steps is None else optimizer.skipped_steps.item()
    norm = None if optimizer.grad_norm is None else optimizer.grad_norm.item()
    counts = [int(optimizer.state[it]["step"]) if it in optimizer.state else 0 for it in ours]
    is_whole = idle_rank >= WORLD
    if is_whole:
        assert decided[0] == sides[1][2].get_scale()
        assert decided[1] is None or decided[1] == lonely.skipped_steps.item()
        assert counts == [int(lonely.state[it]["step"]) if it in lonely.state else 0 for it in alone]
        assert norm is None or norm == pytest.approx(lonely.grad_norm.item(), rel=2**-22, nan_ok=True)
        assert all(same_bits(whole(a), b.detach()) for a, b in zip(ours, alone, strict=True)), seed
    assert all(part_of(it).isfinite().all() for it in ours) or not (is_scaled or dtype == B16)
    return *decided, repr(norm), *(counts if is_whole else ())


def schedules(rank):
    placed = placements()
    decisions = [one_schedule(seed, rank, placed) for seed in range(SCHEDULES)]
    all_decisions = [None] * WORLD
    distributed.all_gather_object(all_decisions, decisions)
    assert all(it == decisions for it in all_decisions)
    assert {it[1] for it in decisions} >= {0, 1, 2}  # steps skipped


@in_processes
def test_processes_decide_alike(tmp_path):
    spawn(schedules, tmp_path, WORLD)
