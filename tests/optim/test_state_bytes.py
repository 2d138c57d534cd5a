"""Bytes a parameter: what each optimizer keeps is docs/optimizers.md's table, what it saves docs/masters.md's."""

from fractions import Fraction

import pytest
import torch

from mpkernels.optim import SGD, Adam, AdamW, Lion, Muon
from tests.networks import B16, F16

F32, INT8 = torch.float32, torch.int8
SIZE = 64 * 256  # whole blocks of 8-bit codes


def bytes_kept(kind, dtype, state_dtype, **options):
    """Return the bytes of weight, grad and states for each element, without the step count."""
    weight = torch.nn.Parameter(torch.ones(SIZE, 1, dtype=dtype))
    optimizer = kind([weight], state_dtype=state_dtype, **options)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    states = [it for key, it in optimizer.state.get(weight, {}).items() if key != "step"]
    return Fraction(sum(it.numel() * it.itemsize for it in (weight, weight.grad, *states)), SIZE)


@pytest.mark.parametrize(
    ("kind", "options", "wanted"),
    [
        (AdamW, {}, (16, 14, 10, 8 + Fraction(1, 32))),
        (Adam, {}, (16, 14, 10, 8 + Fraction(1, 32))),
        (AdamW, {"amsgrad": True}, (20, 18, 12, 9 + Fraction(3, 64))),
        (Adam, {"amsgrad": True}, (20, 18, 12, 9 + Fraction(3, 64))),
        (SGD, {}, (8, 6, 6, 6)),
        (SGD, {"momentum": 0.9}, (12, 10, 8, 7 + Fraction(1, 64))),
        (Lion, {}, (12, 10, 8, 7 + Fraction(1, 64))),
        (Muon, {}, (12, 10, 8, 7 + Fraction(1, 64))),  # without the updates
    ],
    ids=lambda it: getattr(it, "__name__", None) or (str(it) if isinstance(it, dict) else ""),
)
def test_a_training_keeps_as_many_bytes_a_parameter_as_the_docs_say(kind, options, wanted):
    for narrow in (B16, F16):
        kept = [
            bytes_kept(kind, *dtypes, **options)
            for dtypes in ((F32, F32), (narrow, F32), (narrow, B16), (narrow, INT8))
        ]
        assert tuple(kept) == wanted


@pytest.mark.parametrize(
    ("options", "bytes_a_parameter"),
    [({}, 10), ({"state_dtype": B16}, 6), ({"state_dtype": INT8}, 10), ({"master": "fp32", "state_dtype": INT8}, 12)],
    ids=str,
)
def test_a_checkpoint_has_as_many_bytes_a_parameter_as_the_docs_say(options, bytes_a_parameter):
    weight = torch.ones(SIZE, dtype=B16, requires_grad=True)
    optimizer = AdamW([weight], **options)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    states = optimizer.state_dict()["state"][0]
    assert sum(it.nbytes for key, it in states.items() if key != "step") == bytes_a_parameter * SIZE
