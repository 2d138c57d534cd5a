"""Tests in several processes, by gloo."""

import gc
from contextlib import contextmanager

import pytest
import torch
from torch import distributed

needs_gloo = pytest.mark.skipif(not distributed.is_gloo_available(), reason="needs torch with gloo")


def spawn(check, tmp_path, world=2):
    """check(rank) in each."""
    torch.multiprocessing.spawn(_on_rank, args=(check, tmp_path / "store", world), nprocs=world)


def _on_rank(rank, check, file, world):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
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
    """A group of this process, in which nobody is waited for."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.group.WORLD
    leave()
