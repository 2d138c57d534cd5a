"""Optimizers under torch.optim's names, and Lion."""

from mpkernels.optim.adam import Adam
from mpkernels.optim.adamw import AdamW
from mpkernels.optim.lion import Lion
from mpkernels.optim.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "Lion"]
