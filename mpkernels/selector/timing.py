"""How long each of several ways to compute the same takes."""

import warnings
from collections.abc import Callable
from functools import partial
from time import perf_counter

import torch

Run = Callable[[], object]
FEWEST_ROUNDS, MOST_ROUNDS, ENOUGH_SECONDS = 5, 50, 0.2
HOPELESS = 3.0  # times the fastest's time, after a first run: not timed any further
BRIEF_SECONDS = 1e-3  # too short to tell the hopeless from one whom the machine held up


def race(runs: dict[str, Run], device: torch.device) -> dict[str, float]:
    """Return the seconds that each way takes. They are timed in turns, so that other load slows all of them down."""
    runs = {name: run for name, run in runs.items() if _can_run(name, run)}
    first = {name: _seconds(run, device) for name, run in runs.items()}
    most = max(HOPELESS * min(first.values()), BRIEF_SECONDS)
    runs = {name: run for name, run in runs.items() if first[name] <= most}
    times: dict[str, list[float]] = {name: [] for name in runs}
    start = perf_counter()
    for rounds in range(MOST_ROUNDS):
        if rounds >= FEWEST_ROUNDS and perf_counter() - start > ENOUGH_SECONDS:
            break
        for name, run in runs.items():
            times[name].append(_seconds(run, device))
    # What else the machine does only ever adds to a time, and to half of them where it is busy.
    return {name: sorted(of_one)[len(of_one) // 4] for name, of_one in times.items()}


def _can_run(name: str, run: Run) -> bool:
    """Return whether a way works, by a first run, which may also compile and allocate. If one of our kernels fails,
    warn and leave it out: another way can compute the call."""
    try:
        run()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if name == "torch":
            raise  # then it is the call that is wrong
        text = f"mpkernels: the {name} kernel is left out, it can't run here: {error}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
        return False
    return True


def _seconds(run: Run, device: torch.device) -> float:
    settle = partial(torch.cuda.synchronize, device) if device.type == "cuda" else int
    settle()
    start = perf_counter()
    run()
    settle()
    return perf_counter() - start
