"""Helpers for tests of the choice between kernels: they empty the selector, and put a fixed answer in its place."""

from contextlib import nullcontext

import torch

from mpkernels import selector
from mpkernels.selector import table


def empty_selector(monkeypatch):
    """Let the selector know no call and no tuning, and pin nothing."""
    for name, empty in {"by_key": {}, "_chosen": {}, "tuned": {}, "left_to_torch": set()}.items():
        monkeypatch.setattr(selector, name, empty)
    monkeypatch.setattr(selector, "_pinned", None)


def forget_choices(monkeypatch):
    """Empty the selector, and take its table away, so that torch computes everything."""
    empty_selector(monkeypatch)
    monkeypatch.setattr(table, "TABLE", ())
    monkeypatch.setattr(table, "leaves_to_torch", lambda case: False)


def computed_by(monkeypatch, name):
    """Let the table choose the named kernel for every call."""
    monkeypatch.setattr(table, "kernel", lambda case: name)


class CudaAutocast(nullcontext):
    """CUDA's autocast to bf16, which ``torch.autocast`` doesn't turn on without a GPU."""

    def __enter__(self):
        self.before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", torch.bfloat16)

    def __exit__(self, *_):
        torch.set_autocast_enabled("cuda", self.before[0])
        torch.set_autocast_dtype("cuda", self.before[1])
