"""Checkpoints of DTensors: saved by four processes, loaded by one to four, on other meshes, bit for bit."""

import warnings
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from mpkernels.optim import AdamW
from tests.distributed.sharding import WORLD, backward, mesh_of, network, part_of, shard, whole, wholes
from tests.hard_grads import same_bits
from tests.networks import B16, F16
from tests.processes import alone, in_processes, spawn

FULL = StateDictOptions(full_state_dict=True)
FROM_FIRST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
CASES = {
    "fp32": (torch.float32, {"amsgrad": True}),
    "split bf16": (B16, {}),
    "split fp16": (F16, {}),
    "copy": (B16, {"master": "fp32"}),
    "bf16 moments": (B16, {"state_dtype": B16}),
    "int8 moments": (B16, {"state_dtype": torch.int8}),
}


KINDS = "fsdp2", "hsdp", "columns", "tensor parallel"


def training(case, kind, seed=0):
    dtype, options = CASES[case]
    model = network(dtype, seed)
    if kind == "columns":  # divided by another dimension; FSDP2 wants it to be a multiple of the processes
        fully_shard(
            model, shard_placement_fn=lambda param: Shard(param.ndim - 1 if param.shape[-1] % WORLD == 0 else 0)
        )
    elif kind == "tensor parallel":  # some parameters, beside plain ones
        style = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(model, mesh_of("fsdp2"), {"0": style, "4": style})
    elif kind is not None:
        shard(model, kind)
    return model, AdamW(model.parameters(), lr=1e-2, **options)


def run(model, optimizer, numbers):
    for number in numbers:
        optimizer.zero_grad()
        backward(model, number)
        optimizer.step()


def contents(model, optimizer):
    """Return weights and states by name, as whole tensors. Steps are copied: torch returns the optimizer's own."""
    states = get_optimizer_state_dict(model, optimizer, options=FULL)["state"]
    found = {(name, key): value for name, state in states.items() for key, value in state.items()}
    return {name: it.clone() for name, it in (found | dict(enumerate(wholes(model)))).items()}


def assert_same(case, got, want):
    """Assert equal contents. 8-bit moments may differ by one new encoding, in other blocks."""
    assert got.keys() == want.keys()
    for key, value in want.items():
        if case == "int8 moments" and isinstance(key, tuple) and key[1].startswith("exp_avg"):
            roots = [it.double().abs().sqrt() if key[1] == "exp_avg_sq" else it.double() for it in (got[key], value)]
            steps = 255 if key[1] == "exp_avg_sq" else 127
            bound = roots[1].abs().max() * (1 / steps + 1 / (2 * steps) ** 2) * (1 + 2**-20)
            assert ((roots[0] - roots[1]).abs() <= bound).all(), key
        else:
            assert same_bits(got[key], value), (case, key)


def save_and_load_on_four(folder, rank):
    warnings.simplefilter("ignore")
    for case in CASES:
        model, optimizer = training(case, "fsdp2")
        run(model, optimizer, range(3))
        weights, states = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder / case)
        before = contents(model, optimizer)
        full = get_model_state_dict(model, options=FULL), get_optimizer_state_dict(model, optimizer, options=FULL)
        if rank == 0:
            torch.save(before, folder / f"{case} before")
            torch.save(full, folder / f"{case} full")
        run(model, optimizer, range(3, 5))
        after = contents(model, optimizer)
        if rank == 0:
            torch.save(after, folder / f"{case} after")
    distributed.barrier()
    for kind in KINDS:
        load_and_compare(rank, folder, kind)
    states_say_which_part_they_are(rank, folder)


def load_and_compare(rank, folder, kind):
    for case in CASES if kind == "fsdp2" else ("split bf16", "copy", "int8 moments"):
        want, later = (torch.load(folder / f"{case} {when}", weights_only=True) for when in ("before", "after"))
        for is_full in (False,) if kind in KINDS[1:] else (False, True):
            model, optimizer = training(case, kind, seed=5)
            if is_full:
                weights, states = torch.load(folder / f"{case} full", weights_only=True) if rank == 0 else ({}, {})
                set_model_state_dict(model, weights, options=FROM_FIRST)
                set_optimizer_state_dict(model, optimizer, states, options=FROM_FIRST)
            else:
                weights, states = get_state_dict(model, optimizer)
                dcp.load(found := {"model": weights, "optimizer": states}, checkpoint_id=folder / case)
                set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
            assert_same(case, contents(model, optimizer), want)
            run(model, optimizer, range(3, 5))
            sums_up_as_before = distributed.get_world_size() == WORLD and kind != "tensor parallel"
            if case != "int8 moments" and sums_up_as_before:
                assert_same(case, contents(model, optimizer), later)


def states_say_which_part_they_are(rank, folder):
    """States are DTensors, so that torch.distributed.checkpoint joins the parts."""
    param = nn.Parameter(distribute_tensor(torch.arange(8.0).to(B16), mesh_of("fsdp2"), [Shard(0)]))
    optimizer = AdamW([param], master="fp32")
    param.grad = torch.ones_like(param)
    optimizer.step()
    state = optimizer.state[param]
    assert all(it.placements == param.placements for key, it in state.items() if key != "step")
    before = whole(state["master"]).clone()
    dcp.save({"master": state["master"]}, checkpoint_id=folder / "placed")
    other = distribute_tensor(torch.zeros(8), mesh_of("fsdp2"), [Replicate()])
    dcp.load({"master": other}, checkpoint_id=folder / "placed")
    assert same_bits(part_of(other), before)


def load_on_three(folder, rank):
    warnings.simplefilter("ignore")
    load_and_compare(rank, folder, "fsdp2")


def load_on_two(folder, rank):
    warnings.simplefilter("ignore")
    for kind in KINDS[2:]:
        load_and_compare(rank, folder, kind)


@pytest.fixture(scope="module")
def saved_by_four(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    spawn(partial(save_and_load_on_four, folder), tmp_path_factory.mktemp("store"), WORLD)
    return folder


@in_processes
def test_four_processes_load_on_other_meshes(saved_by_four):
    """The fixture's processes have compared already."""


@in_processes
def test_three_processes(saved_by_four, tmp_path):
    spawn(partial(load_on_three, saved_by_four), tmp_path, 3)


@in_processes
def test_two_processes_load_on_other_meshes(saved_by_four, tmp_path):
    spawn(partial(load_on_two, saved_by_four), tmp_path, 2)


@in_processes
def test_one_process_loads(saved_by_four):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with alone(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load_and_compare(0, saved_by_four, None)
    torch.set_num_threads(threads)


def whole_state_dicts_go_both_ways(rank):
    """A state dict of torch's AdamW and one of ours, of whole parameters, into a sharded optimizer; and back."""
    for make in (torch.optim.AdamW, AdamW):
        plain, model = network(), shard(network(), "fsdp2")
        first = make(plain.parameters(), lr=1e-2)
        run(plain, first, range(2))
        second = AdamW(model.parameters(), lr=1e-2)
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(model, get_model_state_dict(plain, options=options), options=options)
        set_optimizer_state_dict(
            model, second, get_optimizer_state_dict(plain, first, options=options), options=options
        )
        third = AdamW(model.parameters(), lr=1e-2)
        third.load_state_dict(first.state_dict())  # by itself, too
        got, want = contents(model, second), contents(plain, first)
        assert all(same_bits(got[key], want[key]) for key in want)
        for a, b in zip(third.state.values(), second.state.values(), strict=True):
            assert all(same_bits(part_of(a[key]), part_of(b[key])) for key in b)
        back = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        states = get_optimizer_state_dict(model, second, options=options)
        set_optimizer_state_dict(plain, back, states)
        assert all(same_bits(back.state[it]["exp_avg"], first.state[it]["exp_avg"]) for it in plain.parameters())


@in_processes
def test_whole_state_dicts_go_into_sharded_optimizers_and_back(tmp_path):
    spawn(whole_state_dicts_go_both_ways, tmp_path, 2)
