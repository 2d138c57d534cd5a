"""Libraries that own the loop: Hugging Face's Trainer, Accelerate, Lightning and Fabric."""

import logging
import tempfile
import warnings

import torch
from torch import nn

from tests import libraries
from tests.matrix.runner import ALL, FIRST, HALF, REST, STEPS, Run, tool

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from lightning.fabric import Fabric
    from lightning.pytorch import LightningModule
    from lightning.pytorch import Trainer as LightningTrainer
    from transformers import Trainer, TrainingArguments

    from mpkernels.integrations.fabric import MixedPrecision as FabricPrecision
    from mpkernels.integrations.lightning import MixedPrecision

logging.getLogger("lightning").setLevel(logging.ERROR)
NUMBERS = [{"number": number} for number in ALL]


def quietly(function):
    """Silence the libraries' warnings, none of which is about mpkernels."""

    def train(run):
        with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
            warnings.simplefilter("ignore")
            return function(run, folder)

    train.__name__ = function.__name__
    return train


class Loss(nn.Module):
    """A model whose forward returns the loss of the next batch."""

    def __init__(self, run: Run, first: int = 0) -> None:
        super().__init__()
        self.model, self.number = run.model, first - 1
        self.loss_of_part = run.loss

    def forward(self, number=None):
        self.number += 1
        with torch.autocast("cpu", enabled=False):
            return {"loss": (self.loss_of_part(self.number, 0) + self.loss_of_part(self.number, 1)) / 2}


def renew(run: Run) -> None:
    """Put a new model and optimizer into the run, to be resumed from a checkpoint."""
    run.model = run.drop_in.network(seed=7)
    run.optimizer, run.scaler = run.drop_in.optimizer(run.model.parameters()), run.drop_in.scaler()


def by_trainer(run: Run, folder: str, first: int, steps: int) -> None:
    options = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_strategy": "no", "max_grad_norm": 0.0}
    options |= {"per_device_train_batch_size": 1, "save_strategy": "steps", "save_steps": HALF, "max_steps": steps}
    constant = torch.optim.lr_scheduler.ConstantLR(run.optimizer, 1.0)
    trainer = Trainer(
        Loss(run, first),
        TrainingArguments(folder, **options, lr_scheduler_type="constant"),
        train_dataset=NUMBERS,
        optimizers=(run.optimizer, constant),
    )
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{first}" if first else None)


@tool()
@quietly
def trainer_resumed(run, folder):
    by_trainer(run, folder, 0, HALF)
    renew(run)
    by_trainer(run, folder, HALF, STEPS)


def prepared(run: Run) -> Accelerator:
    libraries.reset_accelerate()
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = run.scaler if run.scaler.is_enabled() else None  # on a CPU, Accelerate makes none
    accelerator._optimizers = [AcceleratedOptimizer(run.optimizer, device_placement=False, scaler=accelerator.scaler)]
    run.model = accelerator.prepare(run.model)
    return accelerator


def by_accelerate(run: Run, accelerator: Accelerator, numbers: range) -> None:
    (optimizer,) = accelerator._optimizers
    for number in numbers:
        for part in run.parts:
            loss = run.loss(number, part) / 2
            (loss if accelerator.scaler is None else run.scaler.scale(loss)).backward()
        optimizer.step()
        optimizer.zero_grad()


@tool()
@quietly
def accelerate_save_and_load_state(run, folder):
    accelerator = prepared(run)
    by_accelerate(run, accelerator, FIRST)
    accelerator.save_state(folder)
    renew(run)
    accelerator = prepared(run)
    accelerator.load_state(folder)
    by_accelerate(run, accelerator, REST)


class Module(LightningModule):
    def __init__(self, run: Run, first: int) -> None:
        super().__init__()
        self.loss, self.optimizer = Loss(run, first), run.optimizer

    def training_step(self, number, _):
        return self.loss()["loss"]

    def configure_optimizers(self):
        return self.optimizer


def by_lightning(run: Run, folder: str, first: int, steps: int) -> None:
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    plugins = [MixedPrecision("16-mixed", "cpu", run.scaler)] if run.scaler.is_enabled() else []
    trainer = LightningTrainer(
        accelerator="cpu", max_steps=steps, plugins=plugins, default_root_dir=folder, **dict.fromkeys(quiet, False)
    )
    path = f"{folder}/it.ckpt"
    loader = torch.utils.data.DataLoader(range(STEPS), batch_size=1)
    trainer.fit(Module(run, first), loader, ckpt_path=path if first else None)
    trainer.save_checkpoint(path)


@tool()
@quietly
def lightning_resumed(run, folder):
    by_lightning(run, folder, 0, HALF)
    renew(run)
    by_lightning(run, folder, HALF, STEPS)


def by_fabric(run: Run, folder: str, numbers: range) -> None:
    plugins = [FabricPrecision("16-mixed", "cpu", run.scaler)] if run.scaler.is_enabled() else []
    fabric = Fabric(accelerator="cpu", devices=1, plugins=plugins)
    loss, optimizer = fabric.setup(Loss(run, numbers[0]), run.optimizer)
    state = {"model": loss, "optimizer": optimizer}
    if numbers[0]:
        fabric.load(f"{folder}/it.ckpt", state)
    for _ in numbers:
        optimizer.zero_grad()
        fabric.backward(loss()["loss"])
        optimizer.step()
    fabric.save(f"{folder}/it.ckpt", state)


@tool()
@quietly
def fabric_save_and_load(run, folder):
    by_fabric(run, folder, FIRST)
    scaler = run.scaler  # Fabric doesn't save it
    renew(run)
    run.scaler = scaler
    by_fabric(run, folder, REST)
