"""Counts what a step costs beside other processes: calls of all_reduce, and waits of the host."""

from contextlib import ExitStack
from unittest import mock

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from mpkernels.distributed.processes import Processes
from mpkernels.optim.readback import Readback


class Counted(TorchDispatchMode):
    """Counts calls of all_reduce, and numbers that the host reads, unless they are there already."""

    def __init__(self):
        super().__init__()
        self.calls = self.waits = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # then the ops on its local parts come here
        self.calls += op.namespace in ("c10d", "_c10d_functional") and "reduce" in str(op)
        self.waits += op is torch.ops.aten._local_scalar_dense.default
        return op(*args, **(kwargs or {}))

    def __enter__(self):
        on_host, read, tolist, refuse = [], Readback.read, torch.Tensor.tolist, Processes.refuse_if_failed

        def note(readback):
            on_host.append(read(readback))
            return on_host[-1]

        def count(tensor):  # because tolist calls no op
            self.waits += not any(it is tensor for it in on_host)
            return tolist(tensor)

        def leave_out(*args):  # because it reads nothing from a GPU
            waits = self.waits
            refuse(*args)
            self.waits = waits

        self.patches = ExitStack()
        replaced = (Readback, "read", note), (torch.Tensor, "tolist", count), (Processes, refuse.__name__, leave_out)
        for it in replaced:
            self.patches.enter_context(mock.patch.object(*it))
        return super().__enter__()

    def __exit__(self, *error):
        self.patches.close()
        super().__exit__(*error)
