"""Reports as a table what fuse has found in a model."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.nn import Module

from mpkernels._shared.call_model import call
from mpkernels._shared.report_tables import Report, Table
from mpkernels._shared.saved_for_backward import saved_storages
from mpkernels._torch_private.tensors import storage_of
from mpkernels.distributed.restoring import restored
from mpkernels.nn.fusing.classes import become

_NOTHING = (
    "Nothing to fuse: fuse found no activation of a linear layer's output. It reads each module's forward, and the "
    "methods that a forward calls, but no other functions."
)
_WHO_COMPUTES = (
    "A table chooses, by device, dtype and size, which of these calls our kernels compute, and which torch; "
    "mpkernels.tune(model, inputs) times both."
)


class FusedSite(NamedTuple):
    module: str
    stood_there: str
    computed_by: str


class LeftSite(NamedTuple):
    module: str
    stood_there: str
    reason: str


class SavedBytes(NamedTuple):
    plain: int
    fused: int


@dataclass
class FuseReport(Report):
    """What ``fuse`` has found: the sites that it fused, and those that it left. ``print`` shows both as a table."""

    fused: list[FusedSite] = field(default_factory=list)
    left: list[LeftSite] = field(default_factory=list)
    _model: Any = field(default=None, repr=False)
    _classes: list[tuple[Module, type, type]] = field(default_factory=list, repr=False)

    def saved_bytes(self, inputs: Any) -> SavedBytes:
        """Return how many bytes a forward saves for the backward, plain and fused. Parameters and buffers don't count.

        The model runs twice, on the same random numbers, as ``model(*inputs)``, or ``model(**inputs)`` for a mapping.
        After a dry run, it is fused for this measurement only. Each run leaves parameters, buffers and attributes of
        modules as they were; meanwhile the host keeps a copy.
        """
        sizes = []
        device = next((param.device for param in self._model.parameters()), torch.device("cpu"))
        not_counted = {storage_of(it) for it in (*self._model.parameters(), *self._model.buffers())}
        for fused in (False, True):
            with (
                restored([self._model], device),
                self._with_classes(fused),
                torch.random.fork_rng(),
                torch.enable_grad(),
                saved_storages() as saved,
            ):
                call(self._model, inputs)
            sizes.append(sum(size for storage, size in saved.items() if storage.cdata not in not_counted))
        return SavedBytes(*sizes)

    @contextmanager
    def _with_classes(self, fused: bool) -> Iterator[None]:
        before = [(module, type(module)) for module, _, _ in self._classes]
        try:
            for module, plain, kind in self._classes:
                if type(module) in (plain, kind):
                    become(module, kind if fused else plain)
            yield
        finally:
            for module, kind in before:
                become(module, kind)

    def _parts(self) -> list[str | Table]:
        if not (self.fused or self.left):
            return [_NOTHING]
        fused = _table(("fused", "what stood there", "computed by"), self.fused)
        left = _table(("left", "what stands there", "why"), self.left)
        return [fused, "", left, *["", _WHO_COMPUTES] * bool(self.fused)]


def _table(head: tuple[str, str, str], sites: Sequence[tuple[str, str, str]]) -> Table:
    """Return the table with one row for equal sites of many layers: a star stands for their numbers, with a count."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for module, *rest in sites:
        alike.setdefault((re.sub(r"\b\d+\b", "*", module), *rest), []).append(module)
    rows = []
    for (starred, *rest), modules in alike.items():
        name = (starred if len({*modules}) > 1 else modules[0]) or "(the model)"
        rows.append((f"{name} ({len(modules)})" if len(modules) > 1 else name, *rest))
    return Table(head, rows or [("nothing", "", "")])
