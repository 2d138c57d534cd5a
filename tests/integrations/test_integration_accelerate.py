"""Accelerate's loop, against the real library."""

import warnings

import pytest
import torch
from torch.testing import assert_close

from mpkernels import Metrics
from mpkernels.optim import AdamW, Masters
from tests import libraries
from tests.networks import batch, network

pytest.importorskip("accelerate", reason="needs the extra integrations")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler

    from mpkernels.integrations.accelerate import tell_skips

pytestmark = pytest.mark.filterwarnings("ignore")  # Accelerate's own
LR, MAX_NORM = 1e-2, 0.1


@pytest.fixture(autouse=True)
def _fresh_options():
    libraries.reset_accelerate()


def loop(kind, **options):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **options)
    model = network()
    loader = torch.utils.data.DataLoader(range(7), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, kind(model.parameters(), lr=LR), loader)
    norms = []
    for seed in loader:
        with accelerator.accumulate(model):
            inputs, targets = batch(int(seed))
            loss = (model(inputs).float() - targets).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM))
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.unwrap_model(model).state_dict(), torch.stack(norms), optimizer


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_prepare_accumulate_and_clip(precision):
    ours, our_norms, optimizer = loop(AdamW, mixed_precision=precision)
    theirs, their_norms, _ = loop(torch.optim.AdamW, mixed_precision=precision)
    assert len(our_norms) == 4  # three of two batches, and one of the last batch
    assert_close(our_norms, their_norms, rtol=1e-3, atol=0)
    assert_close(ours, theirs, rtol=0, atol=LR / 100)
    assert isinstance(optimizer.optimizer, AdamW)


@pytest.mark.parametrize("make", [AdamW, lambda *args, **options: Masters(torch.optim.AdamW(*args, **options))])
@pytest.mark.parametrize("tells", [True, False])
def test_schedules_wait_for_a_skipped_step_with_tell_skips_alone(tells, make):
    """Without ``tell_skips``, Accelerate doesn't notice skips."""
    Accelerator(cpu=True)
    model = network()
    inner = make(model.parameters(), lr=LR)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100, backoff_factor=2.0**-90)
    optimizer = AcceleratedOptimizer(inner, device_placement=False, scaler=scaler)
    optimizer = tell_skips(optimizer) if tells else optimizer
    schedule = AcceleratedScheduler(torch.optim.lr_scheduler.LinearLR(inner), optimizer, split_batches=True)
    skipped = []
    for seed in range(3):
        inputs, targets = batch(seed)
        scaler.scale((model(inputs) - targets).square().mean() * 2.0**40).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        skipped.append(optimizer.step_was_skipped)
    assert skipped == [tells, False, False]
    assert inner.skipped_steps == 1
    assert schedule.scheduler.last_epoch == (2 if tells else 3)


def test_tell_skips_takes_our_prepared_optimizer_alone():
    accelerator, model = Accelerator(cpu=True), network()
    theirs = accelerator.prepare(torch.optim.AdamW(model.parameters()))
    for wrong in (AdamW(model.parameters()), theirs, (model, theirs)):
        with pytest.raises(TypeError, match=r"^tell_skips: optimizer must be one of mpkernels.optim, prepared, got"):
            tell_skips(wrong)
    assert type(theirs) is AcceleratedOptimizer


def test_metrics_follow_the_prepared_optimizer():
    """``accelerator.scaler`` is None except on a GPU."""
    accelerator, model = Accelerator(cpu=True, mixed_precision="bf16"), network()
    optimizer = accelerator.prepare(AdamW(model.parameters(), max_norm=MAX_NORM))
    metrics = Metrics(optimizer, accelerator.scaler)
    accelerator.backward((model(batch(0)[0]) - batch(0)[1]).square().mean())
    optimizer.step()
    assert metrics.read() == {"grad_norm": optimizer.optimizer.grad_norm.item(), "skipped_steps": 0.0}
