"""Several processes of one process group, for tests of what torch.distributed does to the drop-ins."""

import tempfile
from pathlib import Path

import torch
from torch.multiprocessing import spawn


def on_ranks(count, work, *args):
    """Call ``work(*args)``, a function of a module, in that many processes of a gloo group. What one raises, this
    raises."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (count, str(Path(folder, "store")), work, args), nprocs=count)


def _rank(rank, count, store, work, args):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    try:
        work(*args)
    finally:
        torch.distributed.destroy_process_group()
