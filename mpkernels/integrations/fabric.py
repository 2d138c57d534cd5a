"""Lightning Fabric: a precision plugin.

>>> Fabric(plugins=[MixedPrecision("16-mixed")])
"""

from typing import Literal

import torch
from lightning.fabric.plugins.precision import MixedPrecision as _MixedPrecision
from torch.optim import Optimizer

from mpkernels.amp import GradScaler
from mpkernels.amp.autocasting import machines_device


class OurScaler:
    """Gives a plugin of Lightning's our GradScaler where it is told of none, and the machine's device."""

    def __init__(
        self,
        precision: Literal["16-mixed", "bf16-mixed"],
        device: str | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        device = machines_device() if device is None else device
        if scaler is None and precision == "16-mixed":
            scaler = GradScaler(device)
        super().__init__(precision, device, scaler)  # type: ignore[call-arg]


class MixedPrecision(OurScaler, _MixedPrecision):
    """Fabric's, with our GradScaler, and with ``fabric.clip_gradients`` for optimizers that unscale within their step.

    For those Fabric refuses to clip in fp16: AdamW of ours, and torch's with fused=True. Here grads are unscaled before
    they are clipped, whatever the optimizer.

    Args:
        precision: ``"16-mixed"`` or ``"bf16-mixed"``.
        device: its type, for autocast; None is the machine's.
        scaler: of ``"16-mixed"``; None is ``mpkernels.amp.GradScaler()``.
    """

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
