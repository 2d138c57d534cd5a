"""Two ways to do the same, timed in turns, so that whatever else the machine does slows down both."""

import random
from collections.abc import Callable
from math import comb
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch

FEWEST_SAMPLES = 6  # that have a 95 % interval of the median, from the least to the greatest
MOST_SAMPLES = 101  # more would only fill the results' file: a sample of a short run is the mean of several turns
RUNS_IN_GRAPH = 20  # the shortest kernels take 3 us, and the way from an event to a kernel about as long

Run = Callable[[], object]
Stopwatch = Callable[[], float]


class Pair(NamedTuple):
    """``ours`` and ``theirs`` leave the data as they found it, or it would overflow or go denormal after many runs."""

    op: str
    ours: Run
    theirs: Run
    calls: int  # of the op, in each of the two
    moved: int  # bytes that a call has to read and write
    flops: int = 0  # that a call has to do, where it is these that count
    variant: str = ""  # of the op, or of what it is compared with

    def without_data(self) -> "Pair":
        """To keep: the tensors of all cases together would fill the machine."""
        return self._replace(ours=int, theirs=int)


class Interval(NamedTuple):
    low: float
    median: float
    high: float


class Samples(NamedTuple):
    """Seconds a call took. Neighbours in the two lists were measured together."""

    ours: list[float]
    theirs: list[float]
    waited: float  # for a core that another program had, in all threads together: seconds per second

    def ratio(self) -> Interval:
        """Our time over theirs, sample by sample. Below 1, ours is faster."""
        return median_interval([ours / theirs for ours, theirs in zip(self.ours, self.theirs, strict=True)])


def median_interval(values: list[float]) -> Interval:
    """The median and its 95 % confidence interval by order statistics, which suits any distribution of the noise.

    A value lies below the true median as often as a coin shows heads: what is cut off at each end is a number of heads
    that so many tosses fall short of in 2.5 % of all cases at most.
    """
    ordered = sorted(values)
    outside, tail = 0, 0.0
    while (tail := tail + comb(len(ordered), outside) / 2 ** len(ordered)) <= 0.025:
        outside += 1
    first = max(outside, 1) - 1
    return Interval(ordered[first], median(ordered), ordered[-1 - first])


def measure(pair: Pair, device: str, host_cost: bool, seconds: float) -> Samples:
    """Who is first in a turn is drawn: in a fixed order the scheduler's tick can hit the same one every time."""
    make = gpu_stopwatch if device == "cuda" and not host_cost else wall_stopwatch
    stopwatches = make(pair.ours), make(pair.theirs)
    samples: tuple[list[float], list[float]] = ([], [])
    order = random.Random(0)
    waited, start = -seconds_waited(), perf_counter()
    for stopwatch in stopwatches:
        stopwatch()
    turns = 1 + int(seconds / MOST_SAMPLES / (perf_counter() - start))
    while (taken := len(samples[0])) < FEWEST_SAMPLES or (taken < MOST_SAMPLES and perf_counter() - start < seconds):
        spent = [0.0, 0.0]
        for _ in range(turns):
            for side in order.sample((0, 1), 2):
                spent[side] += stopwatches[side]()
        for side in (0, 1):
            samples[side].append(spent[side] / turns / pair.calls)
    waited += seconds_waited()
    return Samples(*samples, waited / (perf_counter() - start))


def seconds_waited() -> float:
    """What this process's threads have spent ready to run, but not running. Linux only; elsewhere always 0."""
    return sum(int(thread.read_text().split()[1]) for thread in Path("/proc/self/task").glob("*/schedstat")) / 1e9


def wall_stopwatch(run: Run) -> Stopwatch:
    # With a GPU each run starts on an empty queue, for the host must never wait for a full one.
    settle = torch.cuda.synchronize if torch.cuda.is_available() else int

    def timed() -> float:
        settle()
        start = perf_counter()
        run()
        return perf_counter() - start

    timed()
    return timed


def gpu_stopwatch(run: Run) -> Stopwatch:
    """Events around a CUDA graph of several runs: what the host does meanwhile is not in it."""
    run()  # compiles and loads kernels, which can't be captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(RUNS_IN_GRAPH):
            run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def timed() -> float:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / RUNS_IN_GRAPH

    timed()
    return timed
