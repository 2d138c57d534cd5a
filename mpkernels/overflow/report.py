"""Writes the report on a skipped step, for people, logs and TensorBoard, and suggests what to look at next."""

from collections.abc import Sequence
from copy import copy
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import distributed
from torch.optim import Optimizer

from mpkernels._shared.call_model import refuse_no_model
from mpkernels._shared.report_tables import Report, Table
from mpkernels.overflow.first_nonfinite import FirstNonFinite
from mpkernels.overflow.gradient import Gradient, gradient_of
from mpkernels.overflow.ledger import Record

ROWS, WIDTH = 20, 44  # how many culprits the table shows, and how many characters of a name
_NOT_LOOKED = "No step has looked for an inf or NaN; compiled ones, if there were any, have skipped nothing."


class OverflowReport(Report):
    """A report on the last step that was skipped because of an inf or NaN. ``bool(report)`` is False if there was none.

    ``print(report)`` shows a table, ``as_dict()`` is for logs, ``log_to(writer, step)`` for TensorBoard.

    Attributes:
        gradients: one entry for each parameter, with counts and extremes of its grad.
        culprits: the gradients that are not finite, the last parameter first. This is roughly the order in which the
            backward reaches them.
        scale: the loss scale of the skipped step; None without a scaler.
        zeros: the share of all elements that were 0.
        skips_in_a_row: how many steps in a row the scaler has skipped, up to its last update; None without a scaler.
        suggestion: what to look at next.
    """

    def __init__(
        self,
        records: Sequence[tuple[Optimizer, Sequence[Record]]],
        model: torch.nn.Module | None = None,
        found: Any = None,
        skips_in_a_row: int | None = None,
        has_looked: bool = True,
    ) -> None:
        if model is not None:
            refuse_no_model("overflow_report", model)
        self.gradients: list[Gradient] = []
        self.scale: float | None = None
        self.skips_in_a_row = skips_in_a_row
        self._has_looked, self._is_of_a_skip, self._clues = has_looked, False, (model, found)
        for optimizer, device_records in records:
            names = _names(optimizer, model)
            for params, report, follows_grads in device_records:
                (was_skipped, scale, on_grads, *_), *lines = report.tolist()
                if was_skipped:
                    self._is_of_a_skip, self.scale = True, scale or self.scale
                    for param, line in zip(params, lines, strict=True):
                        if line[0] > 0:
                            self.gradients.append(gradient_of(param, line, on_grads, names, follows_grads))
        self._conclude()

    def _conclude(self) -> None:
        model, found = self._clues
        if model is not None:
            place = {name: i for i, (name, _) in enumerate(model.named_parameters())}
            self.gradients.sort(key=lambda it: place.get(it.name, len(place)))
        self.culprits = [it for it in reversed(self.gradients) if not it.is_finite]
        elements = sum(it.elements for it in self.gradients)
        self.zeros = sum(it.zeros * it.elements for it in self.gradients) / max(elements, 1)
        self.suggestion = ""
        if self and found is not None:
            self.suggestion = _advise_on_forward(found.first)
        elif self:
            self.suggestion = _advise_on_gradients(self.gradients, self.culprits, self.scale)

    def gather(self, group: Any = None) -> "OverflowReport":
        """Return the report on the parts of all processes, each with its ``rank``. Every process must call this."""
        part = self.gradients, self._is_of_a_skip, self.scale
        parts: list[Any] = [part]
        if distributed.is_available() and distributed.is_initialized():
            parts *= distributed.get_world_size(group)
            distributed.all_gather_object(parts, part, group=group)
        report = copy(self)
        report.gradients = [replace(it, rank=rank) for rank, (gradients, *_) in enumerate(parts) for it in gradients]
        report._is_of_a_skip = any(was_skipped for _, was_skipped, _ in parts)
        report.scale = next((scale for *_, scale in parts if scale), None)
        report._conclude()
        return report

    def __bool__(self) -> bool:
        return self._is_of_a_skip

    def as_dict(self) -> dict[str, Any]:
        """Return the report as numbers, strings and lists, which JSON can hold."""
        return {
            "skipped": bool(self),
            "scale": self.scale,
            "skips_in_a_row": self.skips_in_a_row,
            "gradients": len(self.gradients),
            "zeros": self.zeros,
            "culprits": [
                asdict(it) | {"shape": list(it.shape), "first": None if it.first is None else list(it.first)}
                for it in self.culprits
            ],
            "suggestion": self.suggestion,
        }

    def log_to(self, writer: Any, step: int | None = None) -> None:
        """Write the report's numbers by ``writer.add_scalar``, a method of TensorBoard's SummaryWriter. Write nothing
        if no step was skipped."""
        if not self:
            return
        writer.add_scalar("overflow/gradients", len(self.culprits), step)
        writer.add_scalar("overflow/zeros", self.zeros, step)
        if self.scale is not None:
            writer.add_scalar("overflow/scale", self.scale, step)
        for culprit in self.culprits:
            counts = {"inf": culprit.infs, "nan": culprit.nans}
            for kind, value in (counts | {"largest": culprit.largest, "zeros": culprit.zeros}).items():
                writer.add_scalar(f"overflow/{kind}/{culprit.name}", value, step)

    def _parts(self) -> list[str | Table]:
        if not self:
            return ["No step has been skipped." if self._has_looked else _NOT_LOOKED]
        at = "" if self.scale is None else f", at scale {self.scale:g}"
        parts: list[str | Table] = [
            f"The newest skipped step{at}: {len(self.culprits)} of {len(self.gradients)} gradients are not finite."
        ]
        if self.culprits:
            parts.append(_table(self.culprits[:ROWS]))
        if len(self.culprits) > ROWS:
            parts.append(f"... and {len(self.culprits) - ROWS} more, in as_dict()")
        most = max(self.gradients, key=lambda it: it.zeros, default=None)
        if most is not None and self.zeros > 0:
            parts.append(f"Zeros: {self.zeros:.1%} of all elements; most in {most.name}, {most.zeros:.1%}.")
        return [*parts, self.suggestion]


def _table(gradients: Sequence[Gradient]) -> Table:
    cells: list[tuple[str, ...]] = [
        ("parameter", "group", "shape", "inf", "nan", "first at", "largest finite", "zeros")
    ]
    for gradient in gradients:
        name = gradient.name if len(gradient.name) <= WIDTH else "..." + gradient.name[3 - WIDTH :]
        first = "" if gradient.first is None else str(list(gradient.first))
        place = name, str(gradient.group), str(list(gradient.shape))
        counts = str(gradient.infs), str(gradient.nans)
        cells.append((*place, *counts, first, f"{gradient.largest:.3g}", f"{gradient.zeros:.1%}"))
    if any(it.rank is not None for it in gradients):
        ranks = ["rank", *(str(it.rank) for it in gradients)]
        cells = [(row[0], rank, *row[1:]) for row, rank in zip(cells, ranks, strict=True)]
    return Table(cells[0], cells[1:])


def _names(optimizer: Optimizer, model: torch.nn.Module | None) -> dict[int, tuple[str, int]]:
    """Return a dict: parameter's id -> its name in the model or the optimizer, and its group's number."""
    names_in_model = {} if model is None else {id(param): name for name, param in model.named_parameters()}
    names = {}
    for number, group in enumerate(optimizer.param_groups):
        given = group.get("param_names") or [f"group {number}, parameter {i}" for i in range(len(group["params"]))]
        for param, name in zip(group["params"], given, strict=True):
            names[id(param)] = names_in_model.get(id(param), name), number
    return names


def _advise_on_forward(first: FirstNonFinite | None) -> str:
    """Return a suggestion from what ``find_nonfinite`` has found in the forward of the skipped step."""
    if first is None:
        return (
            "Every module's output was finite: the loss, or the backward pass under too high a loss scale, made the "
            "first inf or NaN."
        )
    if not first.has_finite_weights:
        return f"The weights of {first} are not finite: an earlier step has spoiled them. Go back to a checkpoint."
    if first.had_finite_inputs:
        return (
            f"{first} was the first to give an inf or NaN, of finite inputs. In fp16, compute it in fp32 or bf16; else "
            "look at what it computes: a division, a root, a logarithm, an exponential."
        )
    return (
        f"{first} was the first module to give an inf or NaN, and got it as an input: look at the data, and at what "
        "the model computes between its modules."
    )


def _advise_on_gradients(gradients: Sequence[Gradient], culprits: Sequence[Gradient], scale: float | None) -> str:
    """Return a suggestion from the gradients of the skipped step."""
    if not culprits:
        return (
            "No gradient here is inf or NaN: one of another process is, or one was whose parameter has left the "
            "optimizer, or a loss scale below 1 is to blame, which makes finite gradients overflow when it is taken "
            "off. Give the scaler a min_scale."
        )
    if len(culprits) > 1 and all(it.nans > 0 for it in gradients):
        has_scale = scale is not None and scale > 1
        high = f", unless the scale of {scale:g} is far too high: see if it falls" if has_scale else ""
        return (
            f"Every gradient holds NaN, so the loss itself, or an input, is inf or NaN{high}. Run a forward pass under "
            "mpkernels.amp.find_nonfinite(model)."
        )
    if scale is None or scale <= 1:
        return f"The loss scale is not to blame: look at {culprits[0].name} and what follows it in the forward pass."
    if with_nans := [it.name for it in culprits if it.nans]:
        return (
            f"NaN appears from {with_nans[0]} on, as where an inf meets a 0: the scale may be too high. If NaN stays "
            "while the scale falls, run find_nonfinite(model)."
        )
    return (
        f"Only infs: the scale of {scale:g} was too high. A dynamic scale backs off by itself; now and then that is "
        "normal."
    )
