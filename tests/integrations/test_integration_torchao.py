"""torchao's conversions of every nn.Linear, against the real library: LinearAct stays as it is."""

import copy
import warnings

import pytest
import torch
from torch.nn import functional
from torch.testing import assert_close

from mpkernels.nn import LinearAct

pytest.importorskip("torchao", reason="needs the extra integrations")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchao.float8 import convert_to_float8_training
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

pytestmark = pytest.mark.filterwarnings("ignore")  # torchao's own
X = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(LinearAct(32, 64, activation="relu"), torch.nn.Linear(64, 32))


def to_int8(model, **options):
    quantize_(model, Int8WeightOnlyConfig(), **options)
    return model


@pytest.mark.parametrize("convert", [convert_to_float8_training, to_int8])
def test_it_is_left_alone(convert):
    before, converted = network(), convert(network())
    assert type(converted[0]) is LinearAct
    assert torch.equal(converted[0](X), before[0](X))
    assert not torch.equal(converted(X), before(X))  # the other layer was converted


def test_float8_trains_around_it():
    model = convert_to_float8_training(network())
    model(X).square().mean().backward()
    assert all(it.grad.isfinite().all() for it in model.parameters())
    assert (model[0](X) >= 0).all()


def test_a_weight_that_is_quantized_by_name_is_computed_with():
    """The activation stays behind the product."""
    layer = network()[0]
    theirs = to_int8(torch.nn.Sequential(copy.deepcopy(layer).to_linear()))
    ours = to_int8(torch.nn.Sequential(layer), filter_fn=lambda module, name: isinstance(module, LinearAct))
    assert type(ours[0].weight) is type(theirs[0].weight) is not torch.nn.Parameter
    with torch.no_grad():
        assert_close(ours(X), functional.relu(theirs(X)))
