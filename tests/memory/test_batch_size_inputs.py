"""find_max_batch_size tries a step with batches of random numbers, or with those that make_batch returns."""

import re
import sys
from collections import UserDict

import pytest
import torch
from torch import nn

import mpkernels
from mpkernels.amp import to_mixed
from tests.networks import B16, F16, network

pytestmark = pytest.mark.exhaustive


@pytest.mark.parametrize("dtype", [B16, F16, torch.float64], ids=str)
def test_random_numbers_come_in_the_models_dtype(dtype):
    seen = []
    model = network(dtype)
    model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    assert mpkernels.find_max_batch_size(model, (20,), max_batch=2) == 2
    assert seen == [dtype] * 2


def test_a_converted_model_takes_fp32():
    assert mpkernels.find_max_batch_size(to_mixed(network()), (20,), max_batch=2) == 2


class TokenModel(nn.Module):
    """A model called like language models: it takes token numbers by name, and returns a mapping."""

    def __init__(self, dtype):
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 4, dtype=dtype), nn.Linear(4, 10, dtype=dtype)
        self.tried = []

    def forward(self, input_ids, attention_mask=None):
        self.tried.append((len(input_ids), input_ids.dtype, attention_mask is not None))
        return {"logits": self.head(self.embed(input_ids)), "mask": attention_mask}


@pytest.mark.each_value_once
@pytest.mark.parametrize(
    ("wrap", "has_mask"),
    [
        (lambda ids: ids, False),
        (lambda ids: (ids,), False),
        (lambda ids: [ids, ids > 0], True),
        (lambda ids: {"input_ids": ids, "attention_mask": ids > 0}, True),
        (lambda ids: UserDict(input_ids=ids), False),  # as tokenizers give them
    ],
    ids=["tensor", "tuple", "list", "dict", "mapping"],
)
@pytest.mark.parametrize("dtype", [torch.float32, B16], ids=str)
def test_a_model_gets_each_kind_of_batch_that_make_batch_returns(wrap, has_mask, dtype):
    model = TokenModel(dtype)
    make = lambda size: wrap(torch.randint(10, (size, 7)))  # noqa: E731
    assert mpkernels.find_max_batch_size(model, make_batch=make, max_batch=3) == 3
    assert model.tried == [(size, torch.int64, has_mask) for size in (1, 2, 3)]


def test_a_step_gets_the_batch_as_it_was_made():
    seen = []
    assert mpkernels.find_max_batch_size(seen.append, make_batch=lambda size: {"n": [size]}, max_batch=2) == 2
    assert seen == [{"n": [1]}, {"n": [2]}]


NO_SHAPES = 8, "x", "", b"x", (2.5,), ("2",), (-2,)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "input_shape or make_batch must be given, got neither"),
        ({"input_shape": (2,), "make_batch": torch.ones}, "input_shape or make_batch must be given, got both"),
        *(({"input_shape": it}, f"input_shape must be the shape of one example, got {it!r}") for it in NO_SHAPES),
        ({"input_shape": (2,), "start": "x"}, "start must be an int, got 'x'"),
        ({"input_shape": (2,), "start": 1.5}, "start must be an int, got 1.5"),
        ({"input_shape": (2,), "max_batch": None}, "max_batch must be an int, got None"),
        ({"input_shape": (2,), "restore": 3}, "restore must be a list of objects to restore, got 3"),
        ({"input_shape": (2,), "device": 3}, "device must be a type of device, such as 'cuda', got 3"),
        ({"make_batch": (2,)}, "make_batch must be a function, got (2,)"),
    ],
)
def test_a_bad_argument_is_named(options, says):
    with pytest.raises(TypeError, match=f"^{re.escape(f'find_max_batch_size: {says}')}$"):
        mpkernels.find_max_batch_size(network(), **options)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions take notes since Python 3.11")
@pytest.mark.parametrize("layer", [nn.Embedding(4, 2), nn.BatchNorm1d(8)], ids=["Embedding", "BatchNorm1d"])
def test_an_error_of_the_model_says_what_batches_are_made_of(layer):
    model, notes = nn.Sequential(layer, nn.Flatten(), nn.LazyLinear(1)), []
    for options in ({"input_shape": (8,)}, {"make_batch": lambda size: torch.ones(size, 8, 1, 1, 1)}):
        with pytest.raises((RuntimeError, ValueError)) as error:
            mpkernels.find_max_batch_size(model, **options)
        notes.append(getattr(error.value, "__notes__", []))
    assert notes[1] == []
    assert notes[0] == [
        "find_max_batch_size: batches are random floats; give make_batch for token numbers, start=2 for nn.BatchNorm1d"
    ]


def test_a_model_whose_output_depends_on_no_weight_is_refused():
    frozen = network().requires_grad_(False)
    frozen.register_parameter("other", nn.Parameter(torch.ones(())))
    with pytest.raises(ValueError, match="model must return tensors that depend on its weights"):
        mpkernels.find_max_batch_size(frozen, (20,))


def test_a_model_without_a_parameter_to_train_is_refused():
    with pytest.raises(ValueError, match="model must have a parameter to train, got one without"):
        mpkernels.find_max_batch_size(network().requires_grad_(False), (20,))
