"""Optimizers under torch.optim's names, Lion, and Masters around any other."""

from mpkernels.optim.adam import Adam
from mpkernels.optim.adamw import AdamW
from mpkernels.optim.lion import Lion
from mpkernels.optim.masters_wrapper import Masters
from mpkernels.optim.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "Lion", "Masters"]
