"""Times several ways to compute the same."""

from collections.abc import Sequence
from time import perf_counter
from typing import Any, NamedTuple

import torch

FEWEST_ROUNDS, MOST_ROUNDS, ENOUGH_SECONDS = 5, 50, 0.5
HOPELESS = 3.0  # a kernel is timed no further if the faster of two runs takes so many times the fastest's time

# A kernel of ours wins up to 1 % or 2 us above torch's time, because it keeps less for the backward.
SHARE, SECONDS = 0.01, 2e-6

Trial = Any  # linear.trial.Trial, of a room above this one


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
    kernel that raises is left out. If torch raises, the call itself is wrong."""
    first: dict[str, float] = {}
    left_out: dict[str, str] = {}
    for name in names:
        try:
            _, *seconds = (_seconds(trial, name, device) for _ in range(3))  # the first run compiles and allocates
            first[name] = min(seconds)
        except Exception as error:
            if name == "torch" or isinstance(error, torch.OutOfMemoryError):
                raise
            left_out[name] = f"it can't run here: {error}"
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


def _seconds(trial: Trial, name: str, device: torch.device) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda _: None
    wait(device)
    start = perf_counter()
    trial.run(name)
    wait(device)
    return perf_counter() - start
