"""Optimizers under torch.optim's names."""

from mpkernels.optim.adamw import AdamW
from mpkernels.optim.masters_wrapper import Masters

__all__ = ["AdamW", "Masters"]
