"""Hugging Face's Trainer: AdamW with the options of TrainingArguments, and its norm and skips in Trainer's log.

>>> trainer = Trainer(model, args, optimizer_cls_and_kwargs=adamw(args), callbacks=[TellSkips()])
>>> trainer.add_callback(LogMixedPrecision(trainer))
"""

from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from transformers import Trainer, TrainerCallback, TrainingArguments

from mpkernels.integrations.accelerate import tell_skips
from mpkernels.metrics import Metrics
from mpkernels.optim import AdamW

_OF_ARGUMENTS = {"lr": "learning_rate", "betas": "adam_beta1", "eps": "adam_epsilon", "weight_decay": "weight_decay"}


def adamw(args: TrainingArguments, **options: Any) -> tuple[type[AdamW], dict[str, Any]]:
    """Return what Trainer takes as ``optimizer_cls_and_kwargs``: AdamW with the options of TrainingArguments.

    Trainer itself makes the parameter groups, so biases and norms are not decayed.

    Args:
        args: gives learning rate, betas, eps and weight decay.
        options: further options of ``mpkernels.optim.AdamW``, such as ``state_dtype=torch.int8``.
    """
    if not isinstance(args, TrainingArguments):
        raise TypeError(f"adamw: args must be transformers.TrainingArguments, got {type(args).__name__}")
    for name in options.keys() & _OF_ARGUMENTS.keys():
        raise TypeError(f"adamw: {name} must be given by TrainingArguments.{_OF_ARGUMENTS[name]}, got {name}= here")
    betas = args.adam_beta1, args.adam_beta2
    return AdamW, {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon, **options}


class TellSkips(TrainerCallback):
    """Makes the learning-rate schedule wait where fp16=True has cost a step. See ``tell_skips`` for Accelerate."""

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if isinstance(optimizer, AcceleratedOptimizer):
            tell_skips(optimizer)


class LogMixedPrecision(TrainerCallback):
    """Logs ``grad_norm``, ``skipped_steps`` and ``loss_scale``, as ``mpkernels.Metrics`` gives them, wherever Trainer
    logs.

    The names begin with ``mpkernels/``. The norm is that after Trainer's clipping: to have it from before, leave the
    clipping to AdamW by ``max_grad_norm=0`` in TrainingArguments and ``adamw(args, max_norm=1.0)``.

    Args:
        trainer: the Trainer whose ``log`` takes the numbers.
    """

    def __init__(self, trainer: Trainer) -> None:
        if not isinstance(trainer, Trainer):
            raise TypeError(f"LogMixedPrecision: trainer must be a transformers.Trainer, got {type(trainer).__name__}")
        self._trainer = trainer
        self._metrics: Metrics | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self._metrics = Metrics(optimizer, self._trainer.accelerator.scaler)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs and self._metrics is not None and (found := self._metrics.read()):
            self._trainer.log({f"mpkernels/{name}": value for name, value in found.items()})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._metrics is not None:
            self._metrics.remove()
