"""What to_mixed and to_full refuse; a refusal changes nothing."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel

from mpkernels.amp import to_full, to_mixed
from mpkernels.optim import AdamW
from tests.networks import B16, F16, network

F32 = torch.float32


def doubled():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())


def too_large():
    model = nn.Linear(2, 2)
    model.weight.data[0, 0] = 1e5
    return model


def replaced():
    model = nn.Linear(2, 2)
    model.forward = lambda x: x
    return model


REFUSALS = [
    (doubled, {}, "1.weight must be torch.float32 or torch.bfloat16, got torch.float64"),
    (lambda: nn.Linear(2, 2).to(torch.complex64), {}, "weight must be .* got torch.complex64"),
    (lambda: nn.Linear(2, 2).half(), {}, "weight must be .* got torch.float16"),
    (lambda: nn.LazyLinear(2), {}, "weight must be initialised"),
    (too_large, {"dtype": F16}, "weight must fit torch.float16, got 100000"),
    (lambda: to_mixed(nn.Linear(2, 2)), {}, "not be converted yet"),
    (lambda: nn.Sequential(to_mixed(nn.Linear(2, 2))), {}, "not be converted yet"),
    (lambda: DataParallel(nn.Linear(2, 2)), {}, "wrapped or compiled, got DataParallel; convert it before"),
    (
        lambda: torch.compile(nn.Linear(2, 2), backend="eager"),
        {},
        "wrapped or compiled, got OptimizedModule; convert it before",
    ),
    (replaced, {}, "forward, got one that was replaced"),
    (lambda: torch.fx.symbolic_trace(nn.Linear(2, 2)), {}, "forward, got one that was replaced, scripted or traced"),
    (lambda: nn.Linear(2, 2), {"dtype": F32}, "dtype must be torch.bfloat16 or torch.float16, got torch.float32"),
    (lambda: nn.Linear(2, 2), {"keep_fp32": ["head"]}, "keep_fp32 must name .* got 'head'"),
]


@pytest.mark.parametrize(("make", "options", "why"), REFUSALS, ids=[why for *_, why in REFUSALS])
@pytest.mark.filterwarnings("ignore:(Lazy|Complex) modules are a new feature")
def test_to_mixed_refuses_and_changes_nothing(make, options, why):
    model = make()
    kind, before = type(model), [param.dtype for param in model.parameters()]
    with pytest.raises(ValueError, match=f"to_mixed: .*{why}"):
        to_mixed(model, **options)
    assert type(model) is kind
    assert [param.dtype for param in model.parameters()] == before


def test_to_mixed_refuses_another_librarys_optimizer():
    model = network()
    with pytest.raises(
        TypeError, match=r"must be AdamW, Adam, SGD, Lion or Muon of mpkernels.optim, got torch.optim.sgd.SGD"
    ):
        to_mixed(model, optimizer=torch.optim.SGD(model.parameters()))
    assert model[0].weight.dtype == F32


def test_to_mixed_refuses_the_optimizer_of_another_model():
    model = network()
    with pytest.raises(
        ValueError, match=r"^to_mixed: optimizer must hold parameters of the model, got one that holds n"
    ):
        to_mixed(model, optimizer=AdamW(network().parameters()))
    assert model[0].weight.dtype == F32


def test_to_full_refuses():
    model = to_mixed(network())
    with pytest.raises(
        TypeError, match=r"must be AdamW, Adam, SGD, Lion or Muon of mpkernels.optim, got torch.optim.adamw.AdamW"
    ):
        to_full(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError, match=r"must hold the master of 3.weight"):
        to_full(model, AdamW(model[0].parameters()))
    optimizer = AdamW(model.parameters())
    release = optimizer.release_grads()
    with pytest.raises(ValueError, match="must not release grads"):
        to_full(model, optimizer)
    with pytest.raises(ValueError, match=r"got DataParallel; pass the model inside DDP or torch.compile$"):
        to_full(DataParallel(model), optimizer)
    assert model[0].weight.dtype == B16
    release.remove()
    to_full(model, optimizer)
    with pytest.raises(ValueError, match="must come from to_mixed, got Sequential"):
        to_full(model.bfloat16(), optimizer)
