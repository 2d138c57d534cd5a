"""Each optimizer refuses what torch's refuse, by the same words, and bad options of its own."""

import pytest
import torch
from torch.testing._internal import common_optimizers

from mpkernels.optim import SGD, Adam, AdamW, Masters
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


class Float8Tensor(torch.Tensor):
    """What a weight of TransformerEngine's is like under quantized_model_init: it says that it has 16 or 32 bits."""

    __module__ = "transformer_engine.pytorch.tensor.float8_tensor"

    @staticmethod
    def __new__(cls, dtype):
        return torch.Tensor._make_wrapper_subclass(cls, (4, 4), dtype=dtype)

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        return cls(args[0].dtype)


@each_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, B16])
def test_transformer_engines_quantised_weights_are_refused(line, dtype):
    """A step's result would be rounded to 8 bits, and small steps be lost without a word."""
    params, bad = [torch.ones(4, 4, requires_grad=True)], torch.nn.Parameter(Float8Tensor(dtype))
    says = r"params\[1\] must be in 16 or 32 bits, got TransformerEngine's Float8Tensor, which rounds .* FusedAdam"
    for make in (line.ours, lambda it: Masters(line.theirs(it))):
        with pytest.raises(TypeError, match=says):
            make([*params, bad])
    optimizer = line.ours(params)
    with pytest.raises(TypeError, match=says.replace("[1", "[0")):
        optimizer.add_param_group({"params": [bad]})
    assert [group["params"] for group in optimizer.param_groups] == [params]
