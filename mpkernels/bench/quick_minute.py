"""Keeps ``--quick`` within a minute."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter


class Clock:
    """Remembers how long the turns of each case took, and so knows which still fit."""

    def __init__(self, seconds: float) -> None:
        self._start, self._seconds = perf_counter(), seconds
        self._longest: dict[str, float] = {}

    @contextmanager
    def turn(self, name: str) -> Iterator[None]:
        start = perf_counter()
        yield
        self._longest[name] = max(perf_counter() - start, self._longest.get(name, 0.0))

    def why_not(self, name: str) -> str:
        """Return why there is no time for a turn of a case; "" if there is. A new case is taken to last as long as the
        longest so far."""
        expected = self._longest.get(name, max(self._longest.values(), default=0.0))
        fits = perf_counter() - self._start + expected <= self._seconds
        return "" if fits else "the minute of --quick is over"
