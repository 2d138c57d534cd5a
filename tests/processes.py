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
    """
    Ends the group of this process, and gloo's threads with it, though a cycle (a model under DDP, say) holds them still.
    A thread that ends after Python does aborts the process (torch 2.13): its last work remembers a context of Python.
    """
    distributed.destroy_process_group()
    gc.collect()


@contextmanager
def alone():
    """A group of this process, in which nobody is waited for."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.group.WORLD
    leave()
