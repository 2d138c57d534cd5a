"""Times several ways to compute the same, and leaves out those whose results are off."""

import math
from collections.abc import Sequence
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

FEWEST_ROUNDS, MOST_ROUNDS, ENOUGH_SECONDS = 5, 50, 0.5
HOPELESS = 3.0  # a kernel is timed no further if the faster of two runs takes so many times the fastest's time

# A kernel of ours wins up to 1 % or 2 us above torch's time, because it keeps less for the backward.
SHARE, SECONDS = 0.01, 2e-6


class Error(NamedTuple):
    """How far numbers are from the exact ones, as a share of the exact norm."""

    share: float
    numbers: int


Trial = Any  # linear.trial.Trial, which imports this module


class Timed(NamedTuple):
    seconds: dict[str, float]
    left_out: dict[str, str]  # kernel that must not be used -> why

    @property
    def best(self) -> str:
        limit = self.seconds["torch"] + max(SHARE * self.seconds["torch"], SECONDS)
        ours = {name: each for name, each in self.seconds.items() if name != "torch" and each <= limit}
        return min(ours, key=ours.__getitem__, default="torch")


def time_ways(trial: Trial, names: Sequence[str], device: torch.device) -> Timed:
    """Return the seconds that each way takes. The ways run in turns, so that other programs slow down all of them. A
    kernel that raises, or whose results are off, is left out. If torch raises, the call itself is wrong."""
    torchs, left_out = trial.errors(_finished(trial, "torch", device)), {}
    for name in names:
        if name != "torch" and (reason := _unfit(trial, name, torchs, device)) is not None:
            left_out[name] = reason
    first = {name: min(_seconds(trial, name, device) for _ in range(2)) for name in names if name not in left_out}
    hopeful = [name for name, each in first.items() if name == "torch" or each <= HOPELESS * min(first.values())]
    times: dict[str, list[float]] = {name: [] for name in hopeful}
    start = perf_counter()
    for rounds in range(MOST_ROUNDS):
        if rounds >= FEWEST_ROUNDS and perf_counter() - start > ENOUGH_SECONDS:
            break
        for name, samples in times.items():
            samples.append(_seconds(trial, name, device))
    # Other programs only add to a time, and on a busy machine to half of them: so the lower quartile counts.
    return Timed({name: sorted(samples)[len(samples) // 4] for name, samples in times.items()}, left_out)


def _unfit(trial: Trial, name: str, torchs: list[Error], device: torch.device) -> str | None:
    """Return why a kernel must not be used. This first run of the kernel compiles and allocates, too."""
    try:
        off = first_off(trial.errors(_finished(trial, name, device)), torchs, trial.dtype)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # another way can compute the call
        return f"it can't run here: {error}"
    return None if off is None else f"its result is off by {off[0].share:.1e}, torch's by {off[1].share:.1e}"


def first_off(ours: Sequence[Error], torchs: Sequence[Error], dtype: torch.dtype) -> tuple[Error, Error] | None:
    """Return the first error of ours that exceeds the library's bound, and torch's beside it.

    The bound is torch's error, 2 % of it, a floor, and luck: torch's error over n numbers may be less than usual by a
    share of 1 / sqrt(n). Where torch's own error isn't finite, as after an overflow, nothing can be told.
    """
    eps = torch.finfo(dtype).eps
    floor = eps / 8 if dtype.itemsize == 2 else 2 * eps
    luck = 2 * (eps + max((it.share for it in torchs if math.isfinite(it.share)), default=0.0))
    for our_error, torchs_error in zip(ours, torchs, strict=True):
        bound = 1.02 * torchs_error.share + floor + luck / math.sqrt(max(1, our_error.numbers))
        if not our_error.share <= bound and math.isfinite(torchs_error.share):
            return our_error, torchs_error
    return None


def _seconds(trial: Trial, name: str, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = perf_counter()
    _finished(trial, name, device)
    return perf_counter() - start


def _finished(trial: Trial, name: str, device: torch.device) -> Sequence[Tensor]:
    """Run, and wait for the device."""
    results: Sequence[Tensor] = trial.run(name)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return results
