"""Helpers for tests of the choice between kernels: a selector without choices, and a fixed answer in its place."""

from mpkernels import selector
from mpkernels.selector import table


def forget_choices(monkeypatch):
    """Reset the selector to its start, and take its table away, so that torch computes everything."""
    for name, empty in {"by_key": {}, "_chosen": {}, "tuned": {}, "left_to_torch": set()}.items():
        monkeypatch.setattr(selector, name, empty)
    monkeypatch.setattr(selector, "_pinned", None)
    monkeypatch.setattr(table, "TABLE", ())
    monkeypatch.setattr(table, "leaves_to_torch", lambda case: False)


def computed_by(monkeypatch, name):
    monkeypatch.setattr(table, "kernel", lambda case: name)
