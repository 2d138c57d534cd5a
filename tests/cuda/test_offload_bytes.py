"""offload allocates on each side the bytes that the tables of docs/offload.md have."""

import pytest
import torch

from benchmarks.offload_on_paper import CHOICES, ELEMENTS, bytes_of, kept
from mpkernels.optim import AdamW
from mpkernels.optim.offload.copies import BUCKET
from tests.cuda.training import CUDA

FEW = 16384  # bytes: room for a step's few numbers


def allocated(before=0):
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() - before


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_a_parameter_takes_the_bytes_that_the_table_has(choice, released):
    weights, states = kept(choice)  # what the table has, from a step on the CPU
    before, few = allocated(), FEW / ELEMENTS
    weight = torch.nn.Parameter(torch.ones(ELEMENTS, dtype=choice.weights, device=CUDA))
    optimizer = AdamW([weight], offload=True, max_norm=1.0, master=choice.master, state_dtype=choice.moments)
    if released:
        optimizer.release_grads()
    assert optimizer.step() is None  # without grads: nothing is made
    weight.backward(torch.ones_like(weight))
    on_gpu = allocated(before) / ELEMENTS
    optimizer.step()
    assert on_gpu - (weights if released else 2 * weights) <= few
    offload, state = optimizer._offload, [it for key, it in optimizer.state[weight].items() if key != "step"]
    (twin,) = offload.twins._twins.values()
    assert twin.part.is_pinned()
    assert bytes_of([twin.part]) == weights
    assert not any(it.is_pinned() or it.is_cuda for it in state)
    assert bytes_of(state) == states
    waiting = [slot.arrival for slot in offload.arrived._slots.values()]
    assert all(it.is_pinned() for it in waiting)
    assert bytes_of(waiting) == (weights if released else 0)
    buckets = [it for it in offload._slices._memory if it.numel()]
    assert all(it.is_pinned() and it.numel() <= BUCKET for it in buckets)
    assert len(buckets) == (0 if released else 1)  # one of three, because there is one parameter


def test_grads_of_several_backwards_take_4_bytes_more():
    weight = torch.nn.Parameter(torch.ones(ELEMENTS, dtype=torch.bfloat16, device=CUDA))
    optimizer = AdamW([weight], offload=True)
    optimizer.release_grads()
    for _ in range(3):
        weight.backward(torch.ones_like(weight))
    optimizer.step()
    (slot,) = optimizer._offload.arrived._slots.values()
    assert not slot._room.is_pinned()
    assert bytes_of([slot._room]) == 4


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_streamed_states_take_the_bytes_that_the_table_has(choice):
    weights, states = kept(choice)
    before = allocated()
    weight = torch.nn.Parameter(torch.ones(ELEMENTS, dtype=choice.weights, device=CUDA))
    optimizer = AdamW([weight], offload="stream", max_norm=1.0, master=choice.master, state_dtype=choice.moments)
    weight.backward(torch.ones_like(weight))
    optimizer.step()
    assert allocated(before) / ELEMENTS - 2 * weights <= states + FEW / ELEMENTS  # one bucket, and it is small
    state = [it for key, it in optimizer.state[weight].items() if key != "step"]
    assert all(it.is_pinned() for it in state)
    assert bytes_of(state) == states
