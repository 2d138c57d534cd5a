"""What tests of the choice between kernels share: a selector that knows nothing yet, and an answer in its place."""

from mpkernels import selector
from mpkernels.selector import table


def forget_choices(monkeypatch):
    """Make the selector as it is at first, without a table: torch computes all."""
    for name, empty in {"by_key": {}, "_chosen": {}, "tuned": {}, "left_to_torch": set()}.items():
        monkeypatch.setattr(selector, name, empty)
    monkeypatch.setattr(selector, "_pinned", None)
    monkeypatch.setattr(table, "TABLE", ())
    monkeypatch.setattr(table, "leaves_to_torch", lambda case: False)


def computed_by(monkeypatch, name):
    monkeypatch.setattr(table, "kernel", lambda case: name)
