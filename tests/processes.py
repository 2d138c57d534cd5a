"""Runs tests in several processes, which communicate by gloo, or by another of torch's backends."""

import gc
import multiprocessing
import warnings
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
from torch import distributed


def why_no_gloo():
    return "" if distributed.is_available() and distributed.is_gloo_available() else "torch was built without it"


needs_gloo = pytest.mark.skipif(why_no_gloo() != "", reason="needs torch with gloo")


def in_processes(test):
    """Mark a test that starts processes. Such tests take long and test no kernel, so they run with --all only."""
    return pytest.mark.exhaustive(needs_gloo(test))


# Modules that most checks import. Processes are forked from one that has imported them, in a tenth of the time.
PRELOADED = (
    *("mpkernels.amp", "mpkernels.nn", "mpkernels.optim", "torch.distributed.checkpoint.state_dict"),
    *("torch.distributed.fsdp.sharded_grad_scaler", "torch.distributed.tensor.parallel", "torch.distributed.optim"),
    "torch._dynamo",  # which an optimizer's first step imports
)


def start(function, arguments, world):
    """Call function(rank, *arguments) in ``world`` processes, and wait for them."""
    multiprocessing.set_forkserver_preload(list(PRELOADED))
    torch.multiprocessing.start_processes(function, arguments, world, start_method="forkserver")


def spawn(check, tmp_path, world=2, backend="gloo", seconds=None):
    """Call check(rank) in each process. ``seconds``: how long a collective may take."""
    timeout = None if seconds is None else timedelta(seconds=seconds)
    start(_on_rank, (check, tmp_path / "store", world, backend, timeout), world)


def run_checks(checks, rank):
    """Run several checks in the same processes, as ``spawn(partial(run_checks, checks), ...)`` does."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    for check in checks:
        check(rank)
        distributed.barrier()


def _on_rank(rank, check, file, world, backend, timeout):
    torch.set_num_threads(1)
    store = f"file://{file}"
    distributed.init_process_group(backend, init_method=store, rank=rank, world_size=world, timeout=timeout)
    if world > 1:
        distributed.barrier()  # until all have joined: gloo can't connect a process to one that has left meanwhile
    try:
        check(rank)
    finally:
        leave()


def leave():
    """End this process's group and gloo's threads. A cycle, such as a model under DDP, may keep the threads alive until
    garbage is collected. A thread's last work holds a context of Python: if the thread outlives Python, torch 2.13
    aborts."""
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
