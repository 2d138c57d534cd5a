"""What a checkpoint of the optimizer takes, as docs/masters.md says."""

import pytest
import torch

from mpkernels.optim import AdamW

WEIGHTS = 4096


@pytest.mark.parametrize(
    ("options", "bytes_a_parameter"),
    [
        ({}, 10),
        ({"state_dtype": torch.bfloat16}, 6),
        ({"state_dtype": torch.int8}, 10),
        ({"master": "fp32", "state_dtype": torch.int8}, 12),
    ],
    ids=str,
)
def test_bytes_of_the_states(options, bytes_a_parameter):
    weight = torch.randn(WEIGHTS).bfloat16().requires_grad_()
    optimizer = AdamW([weight], **options)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    states = optimizer.state_dict()["state"][0]
    assert sum(it.nbytes for key, it in states.items() if key != "step") == bytes_a_parameter * WEIGHTS
