"""Memory reports count the part of a DTensor that lies in this process. A search for a batch size has one process."""

from functools import partial

import pytest
import torch

import mpkernels
from mpkernels.optim import AdamW
from tests.distributed.sharding import even_network, shard
from tests.processes import in_processes, run_checks, spawn

WEIGHTS = 2 * 32 * 64


def loss_of(model):
    return model(torch.ones(8, 64, dtype=torch.bfloat16)).float().sum()


def check_the_report(world, make, moments, rank):
    model = shard(even_network(torch.bfloat16), "fsdp2")
    optimizer = make(model.parameters())
    predicted = mpkernels.memory_report(model, optimizer).predicted
    masters = 2 * WEIGHTS // world if isinstance(optimizer, AdamW) else 0
    assert predicted["parameters"] == predicted["gradients"] == 2 * WEIGHTS // world
    assert (predicted["masters"], predicted["moments"]) == (masters, moments * WEIGHTS // world + 2 * 4)
    loss_of(model).backward()
    optimizer.step()
    measured = mpkernels.memory_report(model, optimizer).measured
    assert measured == {name: predicted[name] for name in measured}


def check_the_activations(world, rank):
    """The first layer's output is its activation's input and the second's; all but the last module frees its whole
    weights."""
    model = shard(even_network(torch.bfloat16), "fsdp2")
    report = mpkernels.memory_report(model, loss=loss_of)
    assert 2 * 8 * (64 + 32 + 32) <= report.predicted["activations"] <= 2 * (8 * (64 + 32 + 32) + WEIGHTS)
    assert all(it.to_local().numel() == WEIGHTS // 2 // world for it in model.parameters())


def check_that_several_are_refused(world, rank):
    with pytest.raises(RuntimeError, match=rf"must not have several processes, got {world}. Call it before"):
        mpkernels.find_max_batch_size(lambda batch: None, (2,), device="cpu")


@in_processes
@pytest.mark.parametrize("world", [2, 4])
def test_reports_count_parts_and_a_search_is_refused(tmp_path, world):
    kinds = (AdamW, 8), (partial(AdamW, master="split", state_dtype=torch.bfloat16), 4), (torch.optim.AdamW, 4)
    checks = [partial(check_the_report, world, make, moments) for make, moments in kinds]
    checks += [partial(check_the_activations, world), partial(check_that_several_are_refused, world)]
    spawn(partial(run_checks, checks), tmp_path, world)
