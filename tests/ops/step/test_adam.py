"""Adam's rule and AdamW's, which share a class in torch."""

import pytest
import torch

from mpkernels.optim import Adam, AdamW
from tests.networks import network, train
from tests.optim.optimizers import all_same_bits, weights


def test_adams_decoupled_decay_is_adamws_which_refuses_adams():
    with pytest.raises(ValueError, match="AdamW: a group must have decoupled_weight_decay=True, got False"):
        AdamW([{"params": [torch.nn.Parameter(torch.ones(2))], "decoupled_weight_decay": False}])
    ours, theirs = network(), network()
    train(ours, Adam(ours.parameters(), 1e-2, weight_decay=0.1, decoupled_weight_decay=True), 10)
    train(theirs, AdamW(theirs.parameters(), 1e-2, weight_decay=0.1), 10)
    assert all_same_bits(weights(ours), weights(theirs))
