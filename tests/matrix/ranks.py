"""Judges all of a table's cells in two processes, which are started once."""

import gc
import importlib
import json
import warnings
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from tests.matrix.runner import judge
from tests.processes import start

WORLD = 2


Cell = tuple[str, str]  # tool and drop-in, by their names


def judge_all(modules: list[str], cells: list[Cell], folder: Path) -> dict[Cell, list[tuple[str, str]]]:
    """Return the verdicts of each process on the tools in ``modules``."""
    start(_on_rank, (modules, cells, folder), WORLD)
    verdicts = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]
    return {cell: [tuple(it[i]) for it in verdicts] for i, cell in enumerate(cells)}


def _on_rank(rank: int, modules: list[str], cells: list[Cell], folder: Path) -> None:
    from tests import conftest  # noqa: F401  selects kernels as in the tests' own process
    from tests.matrix.drop_ins import DROP_INS

    for module in modules:
        importlib.import_module(module)
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    gc.freeze()  # FSDP1 looks for its handles among all objects that might refer to a parameter: spare it these
    found = []
    meeting_point = distributed.FileStore(str(folder / "met"), WORLD)
    for i, (tool, drop_in) in enumerate(cells):
        # Each cell has its own group: a process that raises leaves the other one waiting until the group's timeout. So
        # both meet before they join the next group. The barrier keeps a process in the group until the other joins it.
        meeting_point.set(f"{i} {rank}", "here")
        meeting_point.wait([f"{i} {other}" for other in range(WORLD)], timedelta(minutes=5))
        store = distributed.FileStore(str(folder / f"store {i}"), WORLD)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=20))
        distributed.barrier()
        found.append(judge(tool, DROP_INS[drop_in], parts=(rank,)))
        distributed.destroy_process_group()
    gc.collect()  # as tests.processes.leave does
    (folder / f"{rank}.json").write_text(json.dumps(found))
