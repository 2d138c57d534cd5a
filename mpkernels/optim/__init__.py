"""Optimizers under torch.optim's names."""

from mpkernels.optim.adamw import AdamW

__all__ = ["AdamW"]
