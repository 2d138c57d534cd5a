"""The loops of tutorials on mixed precision. torch's and ours differ only in their imports."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.testing import assert_close

import mpkernels.amp
import mpkernels.optim
from tests.networks import B16, F16, batch, network, one_thread
from tests.processes import in_processes, spawn

__all__ = ["one_thread"]  # a fixture that each test uses

TORCH = SimpleNamespace(
    autocast=torch.amp.autocast,
    GradScaler=torch.amp.GradScaler,
    clip_grad_norm_=torch.nn.utils.clip_grad_norm_,
    AdamW=torch.optim.AdamW,
)
OURS = SimpleNamespace(
    autocast=mpkernels.amp.autocast,
    GradScaler=mpkernels.amp.GradScaler,
    clip_grad_norm_=mpkernels.amp.clip_grad_norm_,
    AdamW=mpkernels.optim.AdamW,
)
LR, STEPS = 1e-3, 6


def fp16_clipped(amp, model):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(device)
    optimizer = amp.AdamW(model.parameters(), lr=LR)
    scaler = amp.GradScaler(device, init_scale=1024)
    for seed in range(STEPS):
        inputs, targets = (it.to(device) for it in batch(seed))
        optimizer.zero_grad(set_to_none=True)
        with amp.autocast(device_type=device, dtype=F16):
            loss = nn.functional.mse_loss(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        amp.clip_grad_norm_(model.parameters(), max_norm=0.1)
        scaler.step(optimizer)
        scaler.update()


def fp16_accumulated(amp, model):
    optimizer = amp.AdamW(model.parameters(), lr=LR)
    scaler = amp.GradScaler("cpu", init_scale=1024)
    for seed in range(2 * STEPS):
        inputs, targets = batch(seed)
        with amp.autocast("cpu", dtype=F16):
            loss = nn.functional.mse_loss(model(inputs), targets) / 2
        scaler.scale(loss).backward()
        if seed % 2:
            scaler.unscale_(optimizer)
            amp.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


def fp16_that_overflows(amp, model):
    optimizer = amp.AdamW(model.parameters(), lr=LR)
    scaler = amp.GradScaler("cpu", init_scale=2.0**21)
    for seed in range(STEPS):
        inputs, targets = batch(seed)
        optimizer.zero_grad()
        with amp.autocast("cpu", dtype=F16):
            loss = nn.functional.mse_loss(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() < 2.0**21


def bf16_without_a_scaler(amp, model):
    optimizer = amp.AdamW(model.parameters(), lr=LR)
    for seed in range(STEPS):
        inputs, targets = batch(seed)
        optimizer.zero_grad()
        with amp.autocast("cpu", dtype=B16):
            loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        amp.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


def bf16_with_a_scaler(amp, model):
    optimizer = amp.AdamW(model.parameters(), lr=LR)
    scaler = amp.GradScaler("cpu", enabled=False)
    for seed in range(STEPS):
        inputs, targets = batch(seed)
        optimizer.zero_grad()
        with amp.autocast("cpu", dtype=B16):
            loss = nn.functional.mse_loss(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        amp.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()


def data_parallel(amp, model):
    fp16_clipped(amp, DataParallel(model))


def compiled(amp, model):
    fp16_clipped(amp, torch.compile(model, backend="aot_eager"))


def two_optimizers(amp, model):
    optimizers = [amp.AdamW(part.parameters(), lr=LR) for part in (model[0], model[2:])]
    scaler = amp.GradScaler("cpu", init_scale=1024)
    for seed in range(STEPS):
        inputs, targets = batch(seed)
        with amp.autocast("cpu", dtype=F16):
            loss = nn.functional.mse_loss(model(inputs), targets)
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()


LOOPS = [
    fp16_clipped,
    fp16_accumulated,
    fp16_that_overflows,
    bf16_without_a_scaler,
    bf16_with_a_scaler,
    data_parallel,
    compiled,
    two_optimizers,
]


def assert_the_same_training(loop):
    """Assert that three trainings end alike: torch's, ours with torch's optimizer, and ours.

    Our optimizer rounds a few operations of a step differently: an update of about lr can be off by some 2^-20 of
    itself, and a weight by 2^-24 of itself. If grads nearly cancel, AdamW's first steps magnify that. lr / 100 is far
    below the effect of a step that is missing, is taken twice or has another size."""
    begin = network()
    ways = TORCH, SimpleNamespace(**vars(OURS) | {"AdamW": torch.optim.AdamW}), OURS
    models = [copy.deepcopy(begin) for _ in ways]
    for way, model in zip(ways, models, strict=True):
        loop(way, model)
    theirs, same_optimizer, ours = (model.state_dict() for model in models)
    assert_close(same_optimizer, theirs, rtol=1e-6, atol=LR / 1000)
    assert_close(ours, theirs, rtol=1e-6, atol=LR / 100)
    assert (theirs["0.weight"].cpu() - begin[0].weight).abs().max() > LR


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_only_the_import_changes(loop):
    assert_the_same_training(loop)


def ddp(amp, model):
    """Each rank sees other batches. Grads are exchanged every other batch."""
    rank, model = torch.distributed.get_rank(), DistributedDataParallel(model)
    optimizer = amp.AdamW(model.parameters(), lr=LR)
    scaler = amp.GradScaler("cpu", init_scale=1024)
    for seed in range(STEPS):
        with model.no_sync(), amp.autocast("cpu", dtype=F16):
            inputs, targets = batch(4 * seed + rank)
            scaler.scale(nn.functional.mse_loss(model(inputs), targets) / 2).backward()
        inputs, targets = batch(4 * seed + 2 + rank)
        with amp.autocast("cpu", dtype=F16):
            loss = nn.functional.mse_loss(model(inputs), targets) / 2
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        amp.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def ddp_with_accumulate(amp, model):
    rank, model = torch.distributed.get_rank(), DistributedDataParallel(model)
    optimizer = amp.AdamW(model.parameters(), lr=LR)
    scaler = amp.GradScaler("cpu", init_scale=1024)
    batches = [batch(2 * i + rank) for i in range(2 * STEPS)]
    for micro in mpkernels.amp.accumulate(batches, 2, optimizer, model=model, scaler=scaler, max_norm=0.1):
        inputs, targets = micro.batch
        with amp.autocast("cpu", dtype=F16):
            loss = nn.functional.mse_loss(model(inputs), targets)
        micro.backward(loss)


def check_ddp(rank):
    assert_the_same_training(ddp)
    models = [network(), network()]
    ddp(OURS, models[0])
    ddp_with_accumulate(OURS, models[1])
    assert_close(models[1].state_dict(), models[0].state_dict(), rtol=0, atol=LR / 100)
    weight_of_rank_0 = models[1][0].weight.detach().clone()
    torch.distributed.broadcast(weight_of_rank_0, 0)
    assert_close(weight_of_rank_0, models[1][0].weight.detach(), rtol=0, atol=0)


@in_processes
def test_only_the_import_changes_in_two_processes_of_ddp(tmp_path):
    spawn(check_ddp, tmp_path)
