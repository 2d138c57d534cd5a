"""Each optimizer refuses what torch's refuse, by the same words, and bad options of its own."""

import pytest
import torch
from torch.testing._internal import common_optimizers

from mpkernels.optim import SGD, Adam, AdamW
from tests.networks import B16, F16, network
from tests.optim.optimizers import each_optimizer

CLASSES = [(AdamW, torch.optim.AdamW), (Adam, torch.optim.Adam), (SGD, torch.optim.SGD)]


def torchs_own(kind, bad=False):
    """Return the inputs that torch's own tests have for a class of this name."""
    if bad:
        return getattr(common_optimizers, f"optim_error_inputs_func_{kind.__name__.lower()}")("cpu", torch.float32)
    return getattr(common_optimizers, f"optim_inputs_func_{kind.__name__.lower()}")("cpu")


BAD = [(*it, case) for it in CLASSES for case in torchs_own(it[0], bad=True)]


@pytest.mark.parametrize(("kind", "twin", "case"), BAD, ids=lambda it: str(getattr(it, "__name__", "")))
def test_the_bad_inputs_of_torchs_own_tests_raise_torchs_errors(kind, twin, case):
    given = case.optimizer_error_input
    with pytest.raises(case.error_type) as ours:
        kind(given.params, **given.kwargs)
    with pytest.raises(case.error_type) as theirs:
        twin(given.params, **given.kwargs)
    assert str(ours.value) == str(theirs.value)


BAD_OPTIONS = [
    ({"master": "fp16"}, ValueError, "master must be 'split' or 'fp32', got 'fp16'"),
    ({"max_norm": 0}, ValueError, "max_norm must be above 0, got 0; None turns clipping off"),
    ({"max_norm": "1"}, TypeError, "max_norm must be a number above 0 or None, got '1'"),
    ({"max_norm": True}, TypeError, "max_norm must be a number above 0 or None, got True"),
    (
        {"max_norm": 1.0, "guard": False},
        ValueError,
        "max_norm needs the guard: a non-finite norm would clip every grad to NaN",
    ),
    ({"guard": "on"}, TypeError, "guard must be True, False or None, got 'on'"),
    ({"guard": 0, "max_norm": 1.0}, TypeError, "guard must be True, False or None, got 0"),
    (
        {"state_dtype": F16},
        ValueError,
        "state_dtype must be torch.float32, torch.bfloat16 or torch.int8, got torch.float16",
    ),
    ({"process_group": 3}, TypeError, "process_group must be a .*"),
    ({"offload": 1.0}, TypeError, "offload must be True, False, 'cpu' or 'stream', got 1.0"),
    ({"state_type": B16}, TypeError, ".* unexpected keyword argument 'state_type'. Did you mean 'state_dtype'\\?"),
    ({"weight_deacy": 1}, TypeError, ".* unexpected keyword argument 'weight_deacy'. Did you mean 'weight_decay'\\?"),
    ({"zzz": 1}, TypeError, ".* unexpected keyword argument 'zzz'"),
]


@each_optimizer
@pytest.mark.parametrize(("options", "error", "text"), BAD_OPTIONS, ids=str)
def test_bad_options_name_the_class(line, options, error, text):
    kind = type("Tuned", (line.kind,), {})
    with pytest.raises(error, match=f"^(Tuned: |{line.kind.__name__}.__init__){text}$"):
        line._replace(kind=kind).ours(network().parameters(), **options)


@each_optimizer
@pytest.mark.parametrize("guard", [None, True])
@pytest.mark.parametrize("dense_steps", [0, 1])
def test_sparse_grads_are_refused(line, dense_steps, guard):
    embedding = torch.nn.Embedding(10, 3, sparse=True)
    optimizer = line.ours(embedding.parameters(), guard=guard)
    for _ in range(dense_steps):
        embedding.weight.grad = torch.ones(10, 3)
        optimizer.step()
    embedding.weight.grad = None
    embedding(torch.tensor([1, 2])).sum().backward()
    name = type(optimizer).__name__
    says = "Adam does not support sparse gradients, please consider SparseAdam instead"  # torch's words
    says = says if name.startswith("Adam") else f"{name} does not support sparse gradients"
    with pytest.raises(RuntimeError, match=f"^{says}$"):
        optimizer.step()
