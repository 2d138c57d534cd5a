"""The forward of a mixed model: under autocast, however it is called, copied or compiled."""

import copy
import functools
import inspect
import pickle
from types import MethodType

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from mpkernels.amp import to_full, to_mixed
from mpkernels.optim import AdamW
from tests.amp.mixed_models import F32, TOKENS, Tied, train_a_step
from tests.networks import B16, F16, network


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_copies_are_mixed_too(duplicate):
    model = to_mixed(Tied())
    twin = duplicate(model)
    assert type(twin) is type(model)
    assert twin.head.weight is twin.embed.weight is not model.head.weight
    assert_close(twin(TOKENS), model(TOKENS), rtol=0, atol=0)


def test_forward_keeps_its_signature():
    assert inspect.signature(to_mixed(Tied()).forward) == inspect.signature(Tied().forward)
    assert to_mixed(Tied(), keep_fp32="*")(TOKENS, scale=2.0).dtype == B16


def test_a_forward_that_is_set_later_runs_under_autocast_too():
    inputs, model = torch.ones(4, 20), to_mixed(network())
    wanted = -model(inputs)
    model.forward = MethodType(lambda self, x: -self[3](self[2](self[1](self[0](x)))), model)
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for each in (model, twin, compiled):
        assert_close(each(inputs), wanted, rtol=0, atol=0)
        assert each(inputs).dtype == B16
    with torch.no_grad():
        twin[3].weight.zero_()
        twin[3].bias.fill_(1)
    assert twin(inputs).tolist() == [[-1.0] * 5] * 4
    assert_close(model(inputs), wanted, rtol=0, atol=0)
    users_forward = model.forward.__wrapped__
    to_full(model, AdamW(model.parameters()))
    assert model.forward.__func__ is users_forward
    assert model(inputs).dtype == F32


@pytest.mark.parametrize("wraps", [True, False])
def test_a_forward_put_into_the_dict_stays_there(wraps):
    """A forward in ``__dict__`` has bypassed ``__setattr__``, so it isn't under autocast."""
    model = to_mixed(network())

    def forward(x):
        return x

    vars(model)["forward"] = functools.wraps(model.forward)(forward) if wraps else forward
    to_full(model, AdamW(model.parameters()))
    assert model.forward is forward
    assert {it.dtype for it in model.parameters()} == {F32}


def test_a_compiled_model_computes_the_same():
    model = to_mixed(network())
    eager = model(torch.ones(4, 20))
    assert eager.dtype == B16
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(compiled(torch.ones(4, 20)), eager, rtol=0, atol=0)
    train_a_step(compiled, torch.ones(4, 20), AdamW(model.parameters()))


def test_the_models_autocast_wins_over_one_around_it():
    model = to_mixed(network())
    with torch.autocast("cpu", dtype=F16):
        assert model(torch.ones(4, 20)).dtype == B16
        assert network()(torch.ones(4, 20)).dtype == F16


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.both = nn.Bilinear(8, 8, 4)

    def forward(self, x):
        return self.both(x, x)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 4)),
        lambda: nn.utils.spectral_norm(nn.Linear(8, 4)),
        Pair,
    ],
    ids=["spectral_norm", "spectral_norm's hook", "Bilinear"],
)
def test_what_autocast_has_no_rule_for_stays_fp32(make, training):
    x = torch.randn(5, 8)
    plain = nn.Sequential(make(), nn.Linear(4, 2)).train(training)
    with torch.no_grad():  # to_mixed rounds the second layer to these
        plain[1].weight.copy_(plain[1].weight.to(B16))
        plain[1].bias.copy_(plain[1].bias.to(B16))
    mixed = to_mixed(copy.deepcopy(plain))
    with torch.autocast("cpu", B16):
        want = plain(x)
    assert_close(mixed(x), want, rtol=0, atol=0)
    assert mixed[1].weight.dtype == B16
    mixed(x).sum().backward()
