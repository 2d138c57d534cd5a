"""Lightning's Trainer with the precision plugin, against the real library."""

import logging
import warnings
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from mpkernels.amp import GradScaler
from mpkernels.optim import AdamW, Masters
from tests.networks import B16, F16, batch, network

pytest.importorskip("lightning", reason="needs the extra integrations")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.loggers import Logger
    from lightning.pytorch.plugins.precision import MixedPrecision as LightningsPrecision

    from mpkernels.integrations.lightning import LogMixedPrecision, MixedPrecision

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own: no workers, no logger, ...
MAX_NORM, LR, BATCHES = 0.1, 1e-2, 6


class Module(LightningModule):
    def __init__(self, kind, by_hand=False, **options):
        super().__init__()
        self.model, self.kind, self.options, self.norms = network(), kind, options, []
        self.automatic_optimization = not by_hand

    def training_step(self, seed, number):
        inputs, targets = batch(int(seed))
        outputs = self.model(inputs)
        self.dtype_of_outputs = outputs.dtype
        loss = (outputs.float() - targets).square().mean()
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.norms.append(torch.nn.utils.get_total_norm([it.grad for it in self.model.parameters()]))

    def configure_optimizers(self):
        return self.kind(self.model.parameters(), lr=LR, **self.options)


def fit(module, precision, tmp_path, clip=MAX_NORM, algorithm="norm", scaler=None, **options):
    options.setdefault("plugins", [MixedPrecision(precision, "cpu", scaler)])
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=options.pop("logger", False),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        gradient_clip_val=clip,
        gradient_clip_algorithm=algorithm if clip else None,
        **options,
    )
    trainer.fit(module, torch.utils.data.DataLoader(range(BATCHES), batch_size=1))
    return trainer


def by_hand(dtype, clip):
    """Train by hand as the trainer should."""
    model, norms = network(), []
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=LR), GradScaler("cpu", enabled=dtype == F16)
    for seed in range(BATCHES):
        inputs, targets = batch(seed)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = (model(inputs).float() - targets).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms.append(torch.nn.utils.get_total_norm([it.grad for it in model.parameters()]))
        clip(model.parameters())
        scaler.step(optimizer)
        scaler.update()
    return model, norms


overflowing = partial(GradScaler, "cpu", init_scale=2.0**60, backoff_factor=2.0**-50)
KINDS = {
    "ours": AdamW,
    "torch's": torch.optim.AdamW,
    "torch's fused": lambda params, lr: torch.optim.AdamW(params, lr, fused=True),
}
CLIPS = {
    "norm": lambda params: torch.nn.utils.clip_grad_norm_(params, MAX_NORM),
    "value": lambda params: torch.nn.utils.clip_grad_value_(params, MAX_NORM),
    None: lambda params: None,
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(("precision", "dtype"), [("16-mixed", F16), ("bf16-mixed", B16)])
@pytest.mark.parametrize("algorithm", CLIPS)
def test_clipping_works(tmp_path, kind, precision, dtype, algorithm):
    module = Module(kind)
    scaler = GradScaler("cpu") if dtype == F16 else None
    fit(module, precision, tmp_path, MAX_NORM if algorithm else None, algorithm, scaler)
    model, norms = by_hand(dtype, CLIPS[algorithm])
    assert module.dtype_of_outputs == dtype
    assert_close(torch.stack(module.norms), torch.stack(norms), rtol=0.02, atol=0)  # of unscaled grads
    assert_close(module.model.state_dict(), model.state_dict(), rtol=0, atol=LR / 20)


def test_manual_optimization_trains_the_same(tmp_path):
    module = Module(AdamW, by_hand=True)
    fit(module, "16-mixed", tmp_path, clip=None)
    model, _ = by_hand(F16, CLIPS[None])
    assert_close(module.model.state_dict(), model.state_dict(), rtol=0, atol=LR / 20)


def test_the_scaler_is_ours_and_saved_with_the_checkpoint(tmp_path):
    trainer = fit(Module(AdamW), "16-mixed", tmp_path)
    plugin = trainer.precision_plugin
    assert isinstance(plugin.scaler, GradScaler)
    trainer.save_checkpoint(tmp_path / "it.ckpt")
    saved = torch.load(tmp_path / "it.ckpt", weights_only=True)
    assert saved[type(plugin).__qualname__]["scale"] == plugin.scaler.get_scale()


def test_without_the_plugin_adamw_can_clip_and_lightning_refuses_to(tmp_path):
    """Lightning assumes that an optimizer which can unscale in its step will do so, even in bf16."""
    lightnings = {"plugins": [LightningsPrecision("bf16-mixed", "cpu")]}
    with pytest.raises(RuntimeError, match="AdamW, does not allow for gradient clipping"):
        fit(Module(AdamW), "bf16-mixed", tmp_path, **lightnings)
    module = Module(AdamW, max_norm=MAX_NORM)
    fit(module, "bf16-mixed", tmp_path, clip=None, **lightnings)
    model, _ = by_hand(B16, CLIPS["norm"])
    assert_close(module.model.state_dict(), model.state_dict(), rtol=0, atol=LR / 20)


def test_lightnings_own_refusals_stay():
    with pytest.raises(ValueError, match="Precision must be '16-mixed' or 'bf16-mixed'"):
        MixedPrecision("16")


def masters_of_torchs(params, max_norm, **options):
    return Masters(torch.optim.AdamW(params, **options), max_norm=max_norm)


class KeepingLogger(Logger):
    """Keeps the metrics that it gets."""

    name, version = "kept", 0

    def __init__(self):
        self.kept = []

    def log_hyperparams(self, params, *args, **kwargs):
        pass

    def log_metrics(self, metrics, step=None):
        self.kept.append((step, metrics))


@pytest.mark.parametrize("make", [AdamW, masters_of_torchs])
def test_the_optimizers_metrics_are_logged(tmp_path, make):
    module, logger = Module(make, max_norm=MAX_NORM), KeepingLogger()
    scaler = overflowing()
    options = {"logger": logger, "callbacks": [LogMixedPrecision()], "log_every_n_steps": 2}
    trainer = fit(module, "16-mixed", tmp_path, clip=None, scaler=scaler, **options)
    found = [(step, metrics) for step, metrics in logger.kept if "mpkernels/grad_norm" in metrics]
    assert [step for step, _ in found] == [2, 4, 6]
    assert [metrics["mpkernels/skipped_steps"] for _, metrics in found] == [1.0] * 3
    assert [metrics["mpkernels/loss_scale"] for _, metrics in found] == [2.0**10] * 3
    optimizer = trainer.optimizers[0]
    assert {int(it["step"]) for it in optimizer.state.values()} == {BATCHES - 1}
    assert len(optimizer._optimizer_step_post_hooks) == 0


def test_a_step_of_several_batches_is_logged_once(tmp_path):
    logger = KeepingLogger()
    options = {"logger": logger, "callbacks": [LogMixedPrecision()], "log_every_n_steps": 1}
    fit(Module(AdamW), "bf16-mixed", tmp_path, clip=None, accumulate_grad_batches=2, **options)
    assert not [step for step, metrics in logger.kept if "mpkernels/grad_norm" in metrics]
    fit(Module(AdamW, guard=True), "bf16-mixed", tmp_path, clip=None, accumulate_grad_batches=2, **options)
    assert [step for step, metrics in logger.kept if "mpkernels/grad_norm" in metrics] == [1, 2, 3]


def test_other_optimizers_are_trained_and_not_logged(tmp_path):
    logger = KeepingLogger()
    options = {"logger": logger, "callbacks": [LogMixedPrecision()], "log_every_n_steps": 1}
    fit(Module(torch.optim.AdamW), "bf16-mixed", tmp_path, **options)
    assert not [metrics for _, metrics in logger.kept if any("mpkernels" in name for name in metrics)]
