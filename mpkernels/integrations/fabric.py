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
    """Makes our GradScaler and the machine's device the defaults of one of Lightning's plugins."""

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
    """Fabric's MixedPrecision plugin with mpkernels' GradScaler. ``fabric.clip_gradients`` works with every optimizer.

    Fabric's own plugin refuses to clip in fp16 if the optimizer unscales inside its step, as our AdamW and torch's
    fused ones do. This one unscales the grads before they are clipped.

    Args:
        precision: ``"16-mixed"`` or ``"bf16-mixed"``.
        device: its type, for autocast; None is the machine's.
        scaler: the scaler for ``"16-mixed"``; None makes an ``mpkernels.amp.GradScaler()``.
    """

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
