"""Keeps the facts about the last skipped step on the device, until somebody asks for a report."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from mpkernels._shared.parameters import params_of, put_on
from mpkernels.ops import overflow_
from mpkernels.ops.grads.overflow import FIELDS


class Record(NamedTuple):
    params: list[Tensor]
    report: Tensor  # a heading and a line for each parameter, which overflow_ or a step fills
    follows_grads: bool  # whether indices count in the grads' order of memory; else in the parameters'


class Ledger:
    """One optimizer's records, one for each device. Each skipped step overwrites them."""

    def __init__(self, follows_grads: bool = False) -> None:
        self._follows_grads = follows_grads
        self._newest: dict[torch.device, Record] = {}
        self._older: dict[torch.device, Record] = {}  # the records before the newest ones

    def report_for(
        self, params: Sequence[Tensor], device: torch.device, all_params: Callable[[], Iterable[Tensor]]
    ) -> Tensor:
        """Return the tensor that a step of these parameters fills if it is skipped. Until then, reports show the facts
        of the last skip, except those of parameters that have left the optimizer."""
        newest = self._newest.get(device)
        if newest is not None and len(newest.params) == len(params) and all(map(is_, newest.params, params)):
            return newest.report
        if newest is not None:
            older, present = self._merged(device), set(map(id, all_params()))
            remaining = [param for param in older.params if id(param) in present]
            self._older[device] = older._replace(params=remaining, report=_among(remaining, older))
        report = torch.zeros(1 + len(params), len(FIELDS), dtype=torch.float64, device=device)
        self._newest[device] = Record(list(params), report, self._follows_grads)
        return report

    def fill(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        found_inf: Tensor,
        scale: Tensor | None,
        unscaled: bool,
        all_params: Callable[[], Iterable[Tensor]],
    ) -> None:
        """Fill the record of found_inf's device, where these grads are, if an inf or NaN was found."""
        device = found_inf.device
        report = self.report_for(params, device, all_params)
        overflow_(grads, found_inf, None if scale is None else put_on(device, scale), unscaled, report)

    def keep(self, devices: Iterable[torch.device]) -> None:
        """Drop the records of all other devices, where grads were before."""
        self._newest = {device: self._newest[device] for device in devices if device in self._newest}

    def records(self) -> list[Record]:
        return [self._merged(device) for device in self._newest]

    def _merged(self, device: torch.device) -> Record:
        """Return the newest record, or the older one, if no step has been skipped since the newest was begun."""
        newest, older = self._newest[device], self._older.get(device)
        if older is None:
            return newest
        params = list({id(param): param for param in (*older.params, *newest.params)}.values())
        report = torch.where(newest.report[0, 0] > 0, _among(params, newest), _among(params, older))
        return Record(params, report, self._follows_grads)


def _among(params: list[Tensor], record: Record) -> Tensor:
    """Return a report on these parameters with the record's lines, and zeros for parameters that it lacks. This indexes
    on the host, because a CUDA graph's capture refuses to copy an index to the device."""
    heading, *lines = record.report.unbind()
    line = {id(param): line for param, line in zip(record.params, lines, strict=True)}
    none = torch.zeros_like(heading)
    return torch.stack([heading, *(line.get(id(param), none) for param in params)])


class Ledgers:
    """The ledgers of a scaler's optimizers. A copy or a pickle of this object is empty."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}  # optimizer's id -> entry, because an optimizer need not be hashable

    def __reduce__(self) -> tuple[type["Ledgers"], tuple[()]]:
        return Ledgers, ()

    def take_up(self, optimizer: Optimizer, overflows: Tensor | None) -> None:
        """Make a ledger for the optimizer if it has none. ``overflows``: the scaler's counts, in a row and in all."""
        if id(optimizer) in self._entries:
            return
        last_skip = None
        if overflows is not None and self._entries:
            last_skip = torch.zeros_like(overflows[1])
            for entry in list(self._entries.values()):
                if entry.last_skip is None:  # this was the only optimizer, so the last skip was its own
                    entry.last_skip = overflows[1].clone()
        self._entries[id(optimizer)] = _Entry(self._hold(optimizer), Ledger(follows_grads=True), last_skip)

    def _hold(self, optimizer: Optimizer) -> Callable[[], Optimizer | None]:
        """Return a reference to the optimizer, if possible a weak one that drops the entry when the optimizer ends."""
        entries, key = self._entries, id(optimizer)
        try:
            return ref(optimizer, lambda _: entries.pop(key, None))
        except TypeError:
            return lambda: optimizer

    def fill(
        self,
        optimizer: Optimizer,
        grads: Mapping[torch.device, tuple[list[Tensor], list[Tensor]]],
        found_infs: Mapping[Any, Tensor],
        scale: Tensor,
        unscaled: bool,
    ) -> None:
        """Fill the records if an inf or NaN was found. ``grads`` has the parameters and their grads on each device."""
        ledger = self._entries[id(optimizer)].ledger
        for device, (params, their_grads) in grads.items():
            flags = [put_on(device, found_inf.reshape(())) for found_inf in found_infs.values()]
            found_inf = flags[0] if len(flags) == 1 else torch.stack(flags).amax()
            ledger.fill(params, their_grads, found_inf, scale, unscaled, partial(params_of, optimizer))

    def count(self, states: Mapping[int, Mapping[str, Any]], overflows: Tensor) -> None:
        """Note, after each update, which optimizer was the last to skip. A single optimizer needs no count."""
        for entry in list(self._entries.values()) if len(self._entries) > 1 else ():
            for found_inf in states.get(id(entry.optimizer()), {}).get("found_inf_per_device", {}).values():
                has_overflowed = put_on(overflows.device, found_inf) != 0
                if entry.last_skip is not None:
                    entry.last_skip.copy_(torch.where(has_overflowed, overflows[1], entry.last_skip))

    def records(self) -> list[tuple[Optimizer, list[Record]]]:
        """Return the records of the optimizers that the last skip concerned. Waits for the device."""
        entries = [(entry.optimizer(), entry) for entry in list(self._entries.values())]
        last = max((int(entry.last_skip) for _, entry in entries if entry.last_skip is not None), default=0)
        return [
            (optimizer, _records_of(optimizer, entry.ledger))
            for optimizer, entry in entries
            if optimizer is not None and (entry.last_skip is None or (int(entry.last_skip) == last and last > 0))
        ]


@dataclass
class _Entry:
    optimizer: Callable[[], Optimizer | None]
    ledger: Ledger
    last_skip: Tensor | None


def _records_of(optimizer: Any, scalers: Ledger) -> list[Record]:
    """Return the records of the optimizer's own ledger; or of the scaler's if the optimizer has none, or if the scaler
    has unscaled the grads before the step."""
    ledger = getattr(optimizer, "_ledger", None)
    optimizers = ledger.records() if isinstance(ledger, Ledger) else []
    was_unscaled = any(record.report[0, 0] > 0 and record.report[0, 1] == 0 for record in optimizers)
    if was_unscaled or not optimizers:
        return scalers.records() or optimizers
    return optimizers
