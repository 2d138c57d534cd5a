"""LinearAct as a module: parameters and their replacements, checkpoints, subclasses, recorders of calls, copies."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn.utils import parametrize, prune
from torch.utils.flop_counter import FlopCounterMode

from mpkernels import backend, nn
from tests.linear_cases import TORCH
from tests.nn.fusing.models import Doubled


def torchs_and_ours(**keywords):
    layers = []
    for make in (torch.nn.Linear, nn.LinearAct):
        torch.manual_seed(3)
        layers.append(make(7, 5, **keywords))
    return layers


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64], ids=str)
def test_parameters_are_those_of_linear(bias, dtype):
    """LinearAct and Linear draw the same numbers from the same seed, and load each other's checkpoints."""
    theirs, ours = torchs_and_ours(bias=bias, dtype=dtype)
    assert not isinstance(ours, torch.nn.Linear)  # else tools that replace all Linears would replace it
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for mine, torchs_own in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, torchs_own)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())


RECORDERS = {
    "jit.trace": torch.jit.trace,
    "fx": lambda layer, x: torch.fx.symbolic_trace(torch.nn.Sequential(layer)),
    "export": lambda layer, x: torch.export.export(torch.nn.Sequential(layer), (x,)).module(),
    "strict export": lambda layer, x: torch.export.export(torch.nn.Sequential(layer), (x,), strict=True).module(),
}


def hold_as_plain_attribute(layer):
    """Keep the weight as a plain attribute, as FullyShardedDataParallel does with its views."""
    weight = layer.weight.detach() + 1
    del layer.weight
    layer.weight = weight


REPLACERS = {
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "prune bias": lambda layer: prune.l1_unstructured(layer, "bias", 0.5),
    "parametrize": lambda layer: parametrize.register_parametrization(layer, "weight", Doubled()),
    "parametrize bias": lambda layer: parametrize.register_parametrization(layer, "bias", Doubled()),
    "weight_norm": lambda layer: torch.nn.utils.weight_norm(layer).weight_g.data.mul_(2),
    "plain attribute": hold_as_plain_attribute,
    "another parameter": lambda layer: setattr(layer, "weight", torch.nn.Parameter(layer.weight.detach() + 1)),
    "another's data": lambda layer: setattr(layer.weight, "data", layer.weight.detach() + 1),
    "no bias": lambda layer: setattr(layer, "bias", None),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of weight_norm
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")  # torch.compile causes it
@pytest.mark.parametrize("replace", REPLACERS.values(), ids=[*REPLACERS])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_layer_computes_with_whatever_replaces_its_parameters(replace, compiled):
    theirs, ours = torchs_and_ours()
    x = torch.randn(3, 7)
    before = ours(x)
    for layer in (theirs, ours):
        replace(layer)
    y = (torch.compile(ours, backend="eager") if compiled else ours)(x)
    torch.testing.assert_close(y, TORCH["gelu"](theirs(x)))
    assert not torch.equal(y, before)


class Standardised(nn.LinearAct):
    """A layer that computes with another weight than it holds."""

    @property
    def weight(self):
        return self._parameters["weight"] - self._parameters["weight"].mean()


def test_a_subclass_may_compute_its_weight():
    layer, x = nn.LinearAct(7, 5), torch.randn(3, 7)
    layer.__class__ = Standardised
    torch.testing.assert_close(layer(x), TORCH["gelu"](torch.nn.functional.linear(x, layer.weight, layer.bias)))


class WithTable(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LinearAct(7, 5)
        self.register_buffer("table", torch.randn(3, 7))

    def forward(self, x):
        return x + self.layer(self.table)


def test_fx_records_the_weight_of_a_layer_whose_input_is_a_constant():
    model, x = WithTable(), torch.zeros(())
    traced = torch.fx.symbolic_trace(model)
    with torch.no_grad():
        model.layer.weight.mul_(2)
    torch.testing.assert_close(traced(x), model(x))


@pytest.mark.parametrize("record", RECORDERS.values(), ids=[*RECORDERS])
def test_recorded_calls_are_torchs(record):
    layer, x = nn.LinearAct(7, 5), torch.randn(3, 7)
    recorded = record(layer, x)
    assert not any(of_ours in str(recorded.graph) for of_ours in ("mpkernels::", "mpkernels.linear_act"))
    torch.testing.assert_close(recorded(x), layer(x))


def test_forward_mode_gives_torchs_tangents():
    layer, x, dx = nn.LinearAct(7, 5).double(), *torch.randn(2, 3, 7, dtype=torch.float64)
    _, want = torch.func.jvp(lambda x: TORCH["gelu"](torch.nn.functional.linear(x, *layer.parameters())), (x,), (dx,))
    with backend("native"):
        torch.testing.assert_close(torch.func.jvp(layer, (x,), (dx,))[1], want)
        with forward_ad.dual_level():
            y = layer(forward_ad.make_dual(x, dx))
            torch.testing.assert_close(forward_ad.unpack_dual(y).tangent, want)


@pytest.mark.parametrize("x_needed", [True, False])
def test_the_counted_flops_are_torchs(x_needed):
    counts = []
    for layer in torchs_and_ours():
        with FlopCounterMode(display=False) as counter:
            layer(torch.randn(3, 7, requires_grad=x_needed)).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_the_repr_has_all_arguments():
    text = "LinearAct(in_features=7, out_features=5, bias=True, activation='gelu')"
    assert repr(nn.LinearAct(7, 5)) == text
