"""Seldom ways into to_mixed."""

import pytest
import torch
from torch import nn

from mpkernels.amp import to_mixed
from mpkernels.optim import AdamW
from tests.amp.mixed_models import F32, Tied
from tests.networks import B16


@pytest.mark.parametrize("name", ["0", "1"])
def test_any_name_of_a_module_keeps_it(name):
    twice = nn.Linear(2, 2)
    assert to_mixed(nn.Sequential(twice, twice), keep_fp32=name)[0].weight.dtype == F32


@pytest.mark.parametrize("name", ["head.weight", "embed.weight"])
def test_any_name_of_what_is_tied_keeps_it(name):
    assert to_mixed(Tied(), keep_fp32=name).embed.weight.dtype == F32


def test_a_model_without_memory():
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    assert to_mixed(model).weight.dtype == B16


def test_ties_go_to_even_beside_an_fp32_master():
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, 1 + 2.0**-8)
    to_mixed(layer, optimizer=AdamW(layer.parameters(), master="fp32"))
    assert layer.weight.item() == 1
