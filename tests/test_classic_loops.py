"""The loops of tutorials on mixed precision. torch's and ours differ only in their imports."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel
from torch.testing import assert_close

import mpkernels.amp
import mpkernels.optim
from tests.networks import B16, F16, batch, network, one_thread

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


def accumulated(amp, model, dtype=F16, enabled=True):
    """Step every other batch. A bf16 loop has its scaler disabled."""
    optimizer = amp.AdamW(model.parameters(), lr=LR)
    scaler = amp.GradScaler("cpu", init_scale=1024, enabled=enabled)
    for seed in range(2 * STEPS):
        inputs, targets = batch(seed)
        with amp.autocast("cpu", dtype=dtype):
            loss = nn.functional.mse_loss(model(inputs), targets) / 2
        scaler.scale(loss).backward()
        if seed % 2:
            scaler.unscale_(optimizer)
            amp.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


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


def two_optimizers_of_which_the_first_steps_overflow(amp, model):
    optimizers = [amp.AdamW(part.parameters(), lr=LR) for part in (model[0], model[2:])]
    scaler = amp.GradScaler("cpu", init_scale=2.0**21)
    for seed in range(STEPS):
        inputs, targets = batch(seed)
        with amp.autocast("cpu", dtype=F16):
            loss = nn.functional.mse_loss(model(inputs), targets)
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
    assert scaler.get_scale() < 2.0**21


LOOPS = {
    "fp16, clipped": fp16_clipped,
    "fp16, accumulated": accumulated,
    "bf16 with a scaler": lambda amp, model: accumulated(amp, model, B16, enabled=False),
    "bf16 without a scaler": bf16_without_a_scaler,
    "two optimizers": two_optimizers_of_which_the_first_steps_overflow,
    "data parallel": lambda amp, model: fp16_clipped(amp, DataParallel(model)),
    "compiled": lambda amp, model: fp16_clipped(amp, torch.compile(model, backend="aot_eager")),
}


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


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_only_the_import_changes(loop):
    assert_the_same_training(loop)
