"""Every drop-in with the tools of other libraries: right or refused. tests/matrix/table.py has the table."""

from dataclasses import replace

import pytest
from torch import nn

from tests import libraries
from tests.matrix import table
from tests.matrix.drop_ins import COLUMNS
from tests.matrix.runner import judge

libraries.need()
from tests.matrix import adapters, offloading, trainers  # noqa: E402

__all__ = ["adapters", "offloading", "trainers"]  # the table's tools


@pytest.mark.each_value_once
@table.parametrize(table.OTHER_LIBRARIES)
def test_with_another_library(tool, drop_in, wanted):
    table.check(judge(tool, drop_in), wanted)


class ActivatingLinear(nn.Linear):
    """A Linear with an activation, as LinearAct must not be."""

    def __init__(self, inputs, outputs, activation):
        super().__init__(inputs, outputs)
        assert activation == "relu"

    def forward(self, x):
        return super().forward(x).relu()


@pytest.mark.parametrize(
    "tool",
    ["peft lora of all linear", "peft lora of the layer", "peft dora of the layer", "torchao float8", "torchao int8"],
)
def test_a_lost_activation_is_noticed(tool):
    drop_in = replace(COLUMNS["layer"][0], first_layer=ActivatingLinear)
    assert judge(tool, drop_in)[0] == "different"
