"""peft's adapters around LinearAct, against the real library. No adapter adds after the activation what belongs before
it: adapters refuse the layer, leave it alone, or change its weight."""

import warnings

import pytest
import torch
from torch.testing import assert_close

from mpkernels.nn import LinearAct

pytest.importorskip("peft", reason="needs the extra integrations")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from peft import LoraConfig, get_peft_model

pytestmark = pytest.mark.filterwarnings("ignore")  # peft's own


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = LinearAct(8, 16, activation="relu")
        self.down = torch.nn.Linear(16, 4)

    def forward(self, x):
        return self.down(self.up(x))


X = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))


def test_a_layers_weight_can_be_adapted():
    """peft finds the weight by its name, and adds to it before the activation."""
    torch.manual_seed(0)
    config = LoraConfig(target_parameters=["up.weight"], target_modules=[], init_lora_weights=False)
    model = get_peft_model(Network(), config)
    y, adapted = model(X), model.base_model.model.up(X)
    assert (adapted >= 0).all()
    merged = model.merge_and_unload()
    assert type(merged.up) is LinearAct
    assert_close((merged(X), merged.up(X)), (y, adapted))


def test_a_layers_linear_can_be_adapted():
    """The way out is ``to_linear``, with the activation as a module of its own."""
    torch.manual_seed(0)
    network = Network()
    want = network(X)
    network.up = torch.nn.Sequential(network.up.to_linear(), torch.nn.ReLU())
    model = get_peft_model(network, LoraConfig(target_modules=["up.0"]))
    assert_close(model(X), want)  # LoRA begins with a delta of 0
    merged = model.merge_and_unload()
    assert_close(LinearAct.from_linear(merged.up[0], merged.up[1])(X), merged.up(X))
