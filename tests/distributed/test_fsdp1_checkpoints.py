"""FSDP1's own checkpoints of our states: it gathers all states of a parameter in one dtype, by collectives that have no
16-bit integers."""

import copy
import warnings
from functools import partial

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

from mpkernels.optim import AdamW
from tests.hard_grads import same_bits
from tests.processes import in_processes, spawn

KINDS = [{}, {"state_dtype": torch.bfloat16}, {"state_dtype": torch.int8}, {"master": "fp32"}]


@in_processes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_resumed_training_is_the_same_to_the_bit(tmp_path, dtype):
    spawn(partial(resume_in_every_way, dtype), tmp_path)


def resume_in_every_way(dtype, rank):
    warnings.simplefilter("ignore", FutureWarning)  # FSDP1 is deprecated
    for options in KINDS:
        for kind in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
            resume(dtype, False, options, kind)
        # In full, FSDP1 on a CPU gathers all states of these into one memory: torch's AdamW gets its moments mixed up.
        resume(dtype, True, options, StateDictType.SHARDED_STATE_DICT)


def resume(dtype, use_orig_params, options, kind):
    model, optimizer = sharded(dtype, 0, use_orig_params, options)
    train(model, optimizer, 3)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        weights = copy.deepcopy(model.state_dict())
    with FullyShardedDataParallel.state_dict_type(model, kind):
        states = copy.deepcopy(FullyShardedDataParallel.optim_state_dict(model, optimizer))
    resumed, other = sharded(dtype, 1, use_orig_params, options)
    with FullyShardedDataParallel.state_dict_type(resumed, kind):
        other.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(resumed, other, states))
    with FullyShardedDataParallel.state_dict_type(resumed, StateDictType.SHARDED_STATE_DICT):
        resumed.load_state_dict(weights)
    for side in ((model, optimizer), (resumed, other)):
        train(*side, 2, first=3)
    for param, twin in zip(model.parameters(), resumed.parameters(), strict=True):
        assert same_bits(param, twin)
        states, twins = optimizer.state[param], other.state[twin]
        assert states.keys() == twins.keys()
        assert all(same_bits(states[key], twins[key]) for key in states)


def sharded(dtype, seed, use_orig_params, options):
    torch.manual_seed(seed)
    layers = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3)).to(dtype)
    model = FullyShardedDataParallel(layers, use_orig_params=use_orig_params, device_id=torch.device("cpu"))
    return model, AdamW(model.parameters(), lr=1e-2, guard=False, **options)


def train(model, optimizer, steps, first=0):
    dtype = next(model.parameters()).dtype
    for seed in range(first, first + steps):
        torch.manual_seed(100 * torch.distributed.get_rank() + seed)
        optimizer.zero_grad()
        model(torch.randn(4, 5).to(dtype)).float().square().sum().backward()
        optimizer.step()
