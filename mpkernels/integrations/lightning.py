"""Lightning: a precision plugin, and a callback that logs our optimizers' grad norm, skips and loss scale.

>>> Trainer(plugins=[MixedPrecision("16-mixed")], callbacks=[LogMixedPrecision()], gradient_clip_val=1.0)
"""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision as _MixedPrecision
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch.optim import Optimizer

from mpkernels._shared.parameters import unwrapped
from mpkernels.amp import clip_grad_norm_
from mpkernels.amp.inf_check import given_group
from mpkernels.integrations.fabric import OurScaler
from mpkernels.metrics import Metrics
from mpkernels.optim.skipping_optimizer import SkippingOptimizer


class MixedPrecision(OurScaler, _MixedPrecision):
    """Lightning's MixedPrecision plugin with mpkernels' GradScaler. ``gradient_clip_val`` works with every optimizer.

    Lightning's own plugin refuses to clip if the optimizer unscales inside its step (Lightning#15555), as our AdamW and
    torch's fused ones do. This one unscales the grads before hooks see them and before they are clipped. In bf16 there
    is nothing to unscale.

    Args:
        precision: ``"16-mixed"`` or ``"bf16-mixed"``.
        device: its type, for autocast; None is the machine's.
        scaler: the scaler for ``"16-mixed"``; None makes an ``mpkernels.amp.GradScaler()``.
    """

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        def closure_and_unscale() -> Any:
            loss = closure()
            if loss is not None or not model.automatic_optimization:  # without a loss there was no backward
                self.scaler.unscale_(optimizer)
            return loss

        is_left_to_us = self.scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False)
        return super().optimizer_step(optimizer, model, closure_and_unscale if is_left_to_us else closure, **kwargs)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        Precision.clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        clip_grad_norm_(self.main_params(optimizer), clip_val, process_group=given_group(self.scaler, optimizer))


class LogMixedPrecision(Callback):
    """Logs ``grad_norm``, ``skipped_steps`` and ``loss_scale``, as ``mpkernels.Metrics`` gives them, to all loggers
    every ``log_every_n_steps``. It follows the optimizers of ``mpkernels.optim``.

    The names begin with ``mpkernels/``; where several are followed, with ``mpkernels/0/``, ``mpkernels/1/``.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._logged_step = trainer.global_step
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        followed = [
            optimizer for optimizer in trainer.optimizers if isinstance(unwrapped(optimizer), SkippingOptimizer)
        ]
        prefixes = ["mpkernels/"] if len(followed) == 1 else [f"mpkernels/{i}/" for i in range(len(followed))]
        self._metrics = {prefix: Metrics(it, scaler) for prefix, it in zip(prefixes, followed, strict=True)}

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        step, interval = trainer.global_step, trainer.log_every_n_steps
        if step == self._logged_step or interval == 0 or step % interval:  # several batches may share a step
            return
        self._logged_step = step
        found = {
            prefix + name: value for prefix, metrics in self._metrics.items() for name, value in metrics.read().items()
        }
        for logger in trainer.loggers if found else ():
            logger.log_metrics(found, step=step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for metrics in self._metrics.values():
            metrics.remove()
