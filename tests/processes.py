"""Runs tests in several processes, which communicate by gloo, or by another of torch's backends."""

import gc
import multiprocessing
import warnings
from contextlib import contextmanager

import pytest
import torch
from torch import distributed


def why_no_gloo():
    return "" if distributed.is_available() and distributed.is_gloo_available() else "torch was built without it"


needs_gloo = pytest.mark.skipif(why_no_gloo() != "", reason="needs torch with gloo")


def in_processes(test):
    """Mark a test that starts processes. It tells nothing of a kernel, and takes long: it runs with --all."""
    return pytest.mark.exhaustive(needs_gloo(test))


# Modules that most checks import. Processes are forked from one that has imported them, in a tenth of the time.
PRELOADED = (
    *("mpkernels.amp", "mpkernels.nn", "mpkernels.optim", "torch.distributed.checkpoint.state_dict"),
    *("torch.distributed.fsdp.sharded_grad_scaler", "torch.distributed.tensor.parallel", "torch.distributed.optim"),
    "torch._dynamo",  # which an optimizer's first step imports
)


def start(function, arguments, world):
    """Call function(rank, *arguments) in as many processes, and wait for them."""
    multiprocessing.set_forkserver_preload(list(PRELOADED))
    torch.multiprocessing.start_processes(function, arguments, world, start_method="forkserver")


def spawn(check, tmp_path, world=2, backend="gloo"):
    """Call check(rank) in each process."""
    start(_on_rank, (check, tmp_path / "store", world, backend), world)


def each(checks, rank):
    """Run several checks in the same processes: an argument for ``spawn``, by ``partial``."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    for check in checks:
        check(rank)
        distributed.barrier()


def _on_rank(rank, check, file, world, backend):
    torch.set_num_threads(1)
    distributed.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=world)
    try:
        check(rank)
    finally:
        leave()


def leave():
    """End the group of this process and gloo's threads, though a cycle (a model under DDP, say) holds them still. The
    last work of a thread remembers a context of Python; where the thread outlives Python, torch 2.13 aborts."""
    distributed.destroy_process_group()
    gc.collect()


@contextmanager
def alone():
    """Make a process group of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield distributed.group.WORLD
    finally:
        leave()
