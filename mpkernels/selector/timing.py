"""How long each of several ways to compute the same takes, of those that do compute the same."""

from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from mpkernels.selector.trial import Error, Trial, first_off

FEWEST_ROUNDS, MOST_ROUNDS, ENOUGH_SECONDS = 5, 50, 0.2
CLOSE, CLOSE_SECONDS = 0.03, 2.0  # where the two fastest differ by less than this share, more rounds tell them apart
HOPELESS = 3.0  # times the fastest's time, after a first run: not timed any further
BRIEF_SECONDS = 1e-3  # too short to tell the hopeless from one whom the machine held up
LIMIT_SECONDS = 10.0  # of kernels that take milliseconds; plain torch on a slow CPU takes a second or two


class Race(NamedTuple):
    seconds: dict[str, float]  # of nobody, where a kernel hangs
    left_out: dict[str, str]  # why, of each kernel that must not be used


class _HangsError(Exception):
    """Of a kernel that has not ended in time, by its name."""


def race(trial: Trial, names: Sequence[str], device: torch.device) -> Race:
    """Return the seconds that each takes, measured in turns, so that whatever else the machine does slows down all.

    A kernel is left out if it raises, if its results are off, or if it takes longer than ``LIMIT_SECONDS``. What hangs
    is not ended: no process can end a part of itself. A device is asked until the time is up whether it is done; if it
    isn't, timing ends, but the kernel goes on, and whatever comes after it in its stream waits. On a CPU a kernel must
    return before anybody can tell how long it took, as must a compiler, whose time does not count. A kernel that
    is wrong at times, or with other data, passes.
    """
    left_out: dict[str, str] = {}
    try:
        return Race(_times(trial, _fit(trial, names, device, left_out), device), left_out)
    except _HangsError as hangs:
        return Race({}, left_out | {str(hangs): f"it has not ended after {LIMIT_SECONDS:.0f} s"})


def _fit(trial: Trial, names: Sequence[str], device: torch.device, left_out: dict[str, str]) -> list[str]:
    """Return those that compute what torch does; if torch raises, it is the call that is wrong."""
    torchs = trial.errors(_finished(trial, "torch", device))
    for name in names:
        if name != "torch" and (reason := _unfit(trial, name, torchs, device)) is not None:
            left_out[name] = reason
    return [name for name in names if name not in left_out]


def _unfit(trial: Trial, name: str, torchs: list[Error], device: torch.device) -> str | None:
    """Return why a kernel must not be used. This first run of it compiles and allocates, too."""
    start = perf_counter()
    try:
        results = _finished(trial, name, device)
        seconds = perf_counter() - start
        off = first_off(trial.errors(results), torchs, trial.dtype)
    except (torch.OutOfMemoryError, _HangsError):
        raise
    except Exception as error:  # need not fail the call, which another can compute
        return f"it can't run here: {error}"
    if device.type == "cpu" and seconds > LIMIT_SECONDS:
        return f"it took {seconds:.0f} s"
    return None if off is None else f"its result is off by {off[0].share:.1e}, torch's by {off[1].share:.1e}"


def _times(trial: Trial, names: Sequence[str], device: torch.device) -> dict[str, float]:
    if device.type == "cpu":
        torch.empty(31 << 20, dtype=torch.uint8)  # malloc keeps memory from now on, as in a process that trains
    first = {name: _seconds(trial, name, device) for name in names}
    most = max(HOPELESS * min(first.values()), BRIEF_SECONDS)
    times: dict[str, list[float]] = {name: [] for name in names if first[name] <= most}
    start = perf_counter()
    for rounds in range(MOST_ROUNDS):
        enough = CLOSE_SECONDS if rounds and _is_close(times) else ENOUGH_SECONDS
        if rounds >= FEWEST_ROUNDS and perf_counter() - start > enough:
            break
        for name, of_one in times.items():
            of_one.append(_seconds(trial, name, device))
    return {name: _typical(of_one) for name, of_one in times.items()}


def _typical(seconds: list[float]) -> float:
    """What else the machine does only ever adds to a time, and to half of them where it is busy."""
    return sorted(seconds)[len(seconds) // 4]


def _is_close(times: dict[str, list[float]]) -> bool:
    fastest, *others = sorted(map(_typical, times.values()))
    return bool(others) and others[0] < fastest * (1 + CLOSE)


def _seconds(trial: Trial, name: str, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = perf_counter()
    _finished(trial, name, device)
    return perf_counter() - start


def _finished(trial: Trial, name: str, device: torch.device) -> Sequence[Tensor]:
    """Return results that are there."""
    results = trial.run(name)
    if device.type == "cuda":
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(device))
        start = perf_counter()
        while not done.query():
            if perf_counter() - start > LIMIT_SECONDS and name != "torch":
                raise _HangsError(name)
    return results
