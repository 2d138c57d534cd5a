"""Ways to compute the same, on a clock of their own, for tests of the selector."""

import pytest
import torch

from mpkernels import selector
from mpkernels.selector import disk, timing
from mpkernels.selector.case import Case
from mpkernels.selector.trial import Error

NAMES = ("native", "torch")
CASE = Case("op", torch.device("cpu"), (3, 5), (torch.float32,), "gelu", 8, NAMES)


class Clock:
    """The selector's, which nothing but a test moves: a busy machine makes a millisecond's sleep last three."""

    seconds = 0.0

    def wait(self, milliseconds):
        self.seconds += milliseconds / 1e3


CLOCK = Clock()


@pytest.fixture(autouse=True)
def afresh(monkeypatch, tmp_path):
    for name, value in (("_is_deterministic", False), ("_known", {}), ("_pinned", None)):
        monkeypatch.setattr(selector, name, value)
    monkeypatch.setattr(timing, "MOST_ROUNDS", timing.FEWEST_ROUNDS)
    monkeypatch.setattr(timing, "perf_counter", lambda: CLOCK.seconds)
    monkeypatch.setattr(disk, "path", lambda: tmp_path / "home" / "choices.json")
    disk._read.cache_clear()
    yield
    disk._read.cache_clear()


class Ways:
    """Ways to do the same that take so many milliseconds, and what else they do."""

    dtype = torch.float16

    def __init__(self, **milliseconds):
        self.milliseconds, self.calls = milliseconds, dict.fromkeys(milliseconds, 0)
        self.also = {}
        self.error_of = dict.fromkeys(milliseconds, 1e-4)

    def __call__(self):
        return self

    def run(self, name):
        self.calls[name] += 1
        CLOCK.wait(self.milliseconds[name])
        self.also.get(name, int)()
        return [self.error_of[name]]

    def errors(self, results):
        return [Error(share, 10**6) for share in results]

    @property
    def were_timed(self):
        return any(self.calls.values())


def another_process():
    selector._known.clear()
    disk._read.cache_clear()
