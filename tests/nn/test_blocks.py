"""GatedLinear and MLP as modules: parameters, copies, training, errors."""

import copy
import pickle

import pytest
import torch
from torch.nn import functional

from mpkernels import nn
from tests.linear_cases import TORCH


class TorchsBlock(torch.nn.Module):
    """A block made of torch.nn's layers. Its parameters have our names with a dot instead of the underscore."""

    def __init__(self, module, layers):
        super().__init__()
        for name in layers:
            outputs, inputs = getattr(module, f"{name}_weight").shape
            bias = getattr(module, f"{name}_bias") is not None
            setattr(self, name, torch.nn.Linear(inputs, outputs, bias))
        self.layers, self.activation = layers, TORCH[module.activation]

    def forward(self, x):
        *first, last = [getattr(self, name) for name in self.layers]
        if self.layers == ("gate", "up"):
            return self.activation(first[0](x)) * last(x)
        h = self.activation(first[0](x))
        return last(h if len(first) == 1 else h * first[1](x))


MAKERS = {
    "GatedLinear": (lambda **k: nn.GatedLinear(7, 5, **k), ("gate", "up")),
    "MLP": (lambda **k: nn.MLP(7, 9, 5, **k), ("fc1", "fc2")),
    "gated MLP": (lambda **k: nn.MLP(7, 9, gated=True, **k), ("gate", "up", "down")),
}
EVERY = pytest.mark.parametrize(("make", "layers"), MAKERS.values(), ids=MAKERS)


@EVERY
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", torch.nn.ReLU()], ids=str)
def test_parameters_and_results_are_those_of_linears(target, make, layers, bias, activation):
    torch.manual_seed(3)
    ours = make(bias=bias, activation=activation)
    torch.manual_seed(3)
    theirs = TorchsBlock(ours, layers)
    assert not any(isinstance(it, torch.nn.Linear) for it in ours.modules())
    assert [name.replace(".", "_") for name in theirs.state_dict()] == [*ours.state_dict()]
    assert all(map(torch.equal, ours.state_dict().values(), theirs.state_dict().values()))
    x = torch.randn(2, 3, 7, device=target.device)
    torch.testing.assert_close(ours.to(target.device)(x), theirs.to(target.device)(x))


@EVERY
def test_blocks_can_be_copied_pickled_and_moved(make, layers):
    ours, x = make(), torch.randn(3, 7)
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(copied(x), ours(x))
    assert make(device="meta", dtype=torch.bfloat16).state_dict().keys() == ours.state_dict().keys()
    assert ours.double()(x.double()).dtype == torch.float64
    assert "activation=" in repr(ours)


def test_dropout_acts_in_training_only():
    ours, x = nn.MLP(7, 40, dropout=0.5), torch.randn(3, 7)
    assert not torch.equal(ours(x), ours(x))
    ours.eval()
    assert torch.equal(ours(x), ours(x))
    h = functional.gelu(functional.linear(x, ours.fc1_weight, ours.fc1_bias))
    torch.testing.assert_close(ours(x), functional.linear(h, ours.fc2_weight, ours.fc2_bias))
