"""Masters over FSDP2's DTensors: two processes train, skip, save and load as one does, bit for bit."""

import copy
import warnings
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from mpkernels.amp import GradScaler
from mpkernels.ops.step.split import join
from mpkernels.optim import AdamW, Masters
from tests.distributed.sharding import backward, even_network, network, part_of, shard, trained, whole, wholes
from tests.distributed.test_fsdp2 import are_same_outcomes
from tests.hard_grads import same_bits
from tests.networks import B16, F16
from tests.processes import alone, in_processes, needs_gloo, run_checks, spawn

F32 = torch.float32
FULL = StateDictOptions(full_state_dict=True)


def make(params, kind=torch.optim.SGD, **options):
    return Masters(kind(params, lr=1e-2, momentum=0.9), **options)


def two_processes_train_as_one(rank):
    """Each of an even network's parts has whole packs of grad_stats, so that the norm has the same bits, too. Of an
    uneven one, a process may have no part at all; without a norm nothing is added up."""
    cases = [(even_network, *it) for it in product((F32, B16, F16), (False, True), (None, 0.1))]
    for new, dtype, is_scaled, max_norm in [*cases, (network, B16, False, None), (network, F16, False, None)]:
        alone, model = new(dtype), shard(new(dtype), "fsdp2")
        scalers = (GradScaler("cpu", init_scale=64.0) if is_scaled else None for _ in range(2))
        guard = None if max_norm or is_scaled or new is network else True
        _, want = trained(alone, partial(make, max_norm=max_norm, guard=guard), next(scalers))
        _, outcomes = trained(model, partial(make, max_norm=max_norm, guard=guard), next(scalers), spoils=rank == 0)
        case = new, dtype, is_scaled, max_norm
        assert new is network or all(map(are_same_outcomes, outcomes, want)), (case, outcomes, want)
        assert all(map(same_bits, wholes(model), wholes(alone))), case


def muon_steps_as_without_masters(rank):
    """Muon's products span the parts of all processes. Masters(Muon) steps as bare Muon does over fp32 parts."""
    model, bare = shard(even_network(B16), "fsdp2"), shard(even_network(B16).float(), "fsdp2")
    ours, theirs = (
        make(model.parameters(), torch.optim.Muon),
        torch.optim.Muon(bare.parameters(), lr=1e-2, momentum=0.9),
    )
    for step in range(3):
        backward(model, step)
        for param, other in zip(model.parameters(), bare.parameters(), strict=True):
            other.grad = param.grad.float()
        ours.step()
        theirs.step()
    for param, other in zip(model.parameters(), bare.parameters(), strict=True):
        assert same_bits(join(part_of(param), part_of(ours.state[param]["remainder"])), part_of(other))


def run(model, optimizer, first, last):
    for step in range(first, last):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def contents(model, optimizer):
    states = [optimizer.state[param] for param in model.parameters()]
    return wholes(model) + [whole(state[key].float()) for state in states for key in ("momentum_buffer", "remainder")]


def checkpoints_go_both_ways(rank, make=make):
    """torch's functions save parts and the whole, and load them into parts and into a whole."""
    model = shard(even_network(B16), "fsdp2")
    optimizer = make(model.parameters())
    run(model, optimizer, 0, 3)
    saved = [
        copy.deepcopy((get_model_state_dict(model, options=it), get_optimizer_state_dict(model, optimizer, options=it)))
        for it in (None, FULL)
    ]
    run(model, optimizer, 3, 5)
    parts, whole_again = shard(even_network(B16, seed=7), "fsdp2"), even_network(B16, seed=7)
    for again, (weights, states), options in ((parts, saved[0], None), (whole_again, saved[1], FULL)):
        resumed = make(again.parameters())
        set_model_state_dict(again, weights, options=options)
        set_optimizer_state_dict(again, resumed, states, options=options)
        run(again, resumed, 3, 5)
        assert all(map(same_bits, contents(again, resumed), contents(model, optimizer)))


def silence_warnings(rank):
    warnings.simplefilter("ignore")


CHECKS = (
    *(silence_warnings, two_processes_train_as_one),
    *(muon_steps_as_without_masters, checkpoints_go_both_ways),
)


@in_processes
def test_two_processes_train_as_one(tmp_path):
    spawn(partial(run_checks, CHECKS), tmp_path)


@needs_gloo
@pytest.mark.parametrize("make", [make, AdamW])
def test_a_backward_refuses_a_weight_that_was_stepped_since_its_forward(make):
    with alone():
        weight = nn.Parameter(distribute_tensor(torch.ones(4, 4, dtype=B16), init_device_mesh("cpu", (1,)), [Shard(0)]))
        optimizer, loss = make([weight]), (weight * weight).sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
