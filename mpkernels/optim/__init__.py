"""Optimizers under torch.optim's names, Lion, Masters around any other, and the true weights that they hold."""

from mpkernels.optim.adam import Adam
from mpkernels.optim.adamw import AdamW
from mpkernels.optim.lion import Lion
from mpkernels.optim.masters import true_weight
from mpkernels.optim.masters_wrapper import Masters
from mpkernels.optim.muon import Muon
from mpkernels.optim.sgd import SGD
from mpkernels.optim.split_params import split_params
from mpkernels.optim.true_weights import TrueWeights

__all__ = ["SGD", "Adam", "AdamW", "Lion", "Masters", "Muon", "TrueWeights", "split_params", "true_weight"]
