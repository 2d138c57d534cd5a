"""Times two ways to do the same in turns, so that other programs slow down both."""

from collections.abc import Callable
from math import comb
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch

FEWEST_SAMPLES = 6  # the fewest whose least and greatest value bound a 95 % interval of the median
BUILDS = 3  # how often the data is made, because speed depends on where it lies; once if that takes long
MOST_SAMPLES = 101  # keeps the results' file small: a short run's sample is the mean of several turns
RUNS_IN_GRAPH = 20  # several, because an event costs about 3 us, as much as the shortest kernels
STEPS_IN_LOOP = 3
WIDE, BUSY = 0.1, 0.05  # samples are in doubt if their interval, or the share of time waited, exceeds this

Workload = Callable[[], object]
Make = Callable[[], Workload]  # makes one side's data and returns its workload
Stopwatch = Callable[[], float]


class Pair(NamedTuple):
    """Two sides. A run must leave the data as it was, else numbers overflow or become denormal after many runs."""

    ours: Make
    theirs: Make
    calls: int = 1  # how often a run calls the op
    moved: int = 0  # bytes that one call of ours has to read and write
    flops: int = 0  # of one call of ours
    clock: str = "device"
    is_counted: bool = False  # whether memory, launches and waits are counted, too


class Interval(NamedTuple):
    low: float
    median: float
    high: float


class Samples(NamedTuple):
    """Seconds a call took. Entries of the two lists at the same place were measured together."""

    ours: list[float]
    theirs: list[float]
    waited: float  # the share of the time for which a thread was ready to run, but other programs had the cores

    def ratio(self) -> Interval:
        """Return their time over ours, sample by sample: above 1, ours is faster."""
        return median_interval([theirs / ours for ours, theirs in zip(self.ours, self.theirs, strict=True)])

    def doubts(self) -> list[str]:
        low, middle, high = self.ratio()
        return ["wide"] * (high - low > WIDE * middle) + ["busy"] * (self.waited > BUSY)


def median_interval(values: list[float]) -> Interval:
    """Return the median and its 95 % confidence interval, by order statistics, which suit any noise.

    A value lies below the true median as often as a coin shows heads. At each end, the most values are cut off such
    that fewer heads than that come in at most 2.5 % of all cases.
    """
    ordered = sorted(values)
    outside, tail = 0, 0.0
    while (tail := tail + comb(len(ordered), outside) / 2 ** len(ordered)) <= 0.025:
        outside += 1
    first = max(outside, 1) - 1
    return Interval(ordered[first], median(ordered), ordered[-1 - first])


def measure(pair: Pair, device: str, seconds: float, builds: int = BUILDS) -> Samples:
    """Measure a pair. Each sample holds both orders, because a side's speed depends on what the cache holds before."""
    make = STOPWATCHES[pair.clock] if device == "cuda" else wall_stopwatch
    samples: tuple[list[float], list[float]] = ([], [])
    waited, start = -seconds_waited(), perf_counter()
    for builds_left in range(builds, 0, -1):
        began = perf_counter()
        stopwatches = make(pair.ours()), make(pair.theirs())
        built = perf_counter()
        for stopwatch in stopwatches:
            stopwatch()
        turns = 1 + max(0, int(seconds / MOST_SAMPLES / (perf_counter() - built) / 2))
        is_last = builds_left == 1 or built - began > seconds
        until = built + seconds / (1 if is_last else builds_left)
        fewest = FEWEST_SAMPLES if is_last else len(samples[0]) + 1
        while len(samples[0]) < fewest or (len(samples[0]) < MOST_SAMPLES and perf_counter() < until):
            spent = [0.0, 0.0]
            for side in (0, 1, 1, 0) * turns:
                spent[side] += stopwatches[side]()
            for side in (0, 1):
                samples[side].append(spent[side] / (2 * turns * pair.calls))
        seconds -= perf_counter() - built
        del stopwatches, stopwatch  # frees their memory
        if is_last:
            break
    waited += seconds_waited()
    return Samples(*samples, waited / (perf_counter() - start))


def seconds_waited() -> float:
    """Return the seconds that this process's threads were ready to run, but didn't. Always 0 on systems but Linux."""
    return sum(int(thread.read_text().split()[1]) for thread in Path("/proc/self/task").glob("*/schedstat")) / 1e9


def wall_stopwatch(run: Workload) -> Stopwatch:
    # Each run starts with an empty queue of the GPU, so that the host never waits for a full one.
    settle = torch.cuda.synchronize if torch.cuda.is_available() else int

    def timed() -> float:
        settle()
        start = perf_counter()
        run()
        return perf_counter() - start

    timed()
    return timed


def graph_stopwatch(run: Workload) -> Stopwatch:
    """Time a CUDA graph of several runs by events, without the host's time."""
    run()  # compiles and loads kernels, which can't be captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(RUNS_IN_GRAPH):
            run()
    held = graph, run  # the graph reads the run's tensors, but doesn't own them
    return _between_events(lambda: held[0].replay(), RUNS_IN_GRAPH)


def loop_stopwatch(run: Workload) -> Stopwatch:
    """Time a few runs by events. Runs are queued back to back as in a training loop, so the host's time counts."""

    def loop() -> None:
        for _ in range(STEPS_IN_LOOP):
            run()

    return _between_events(loop, STEPS_IN_LOOP)


def _between_events(several: Workload, count: int) -> Stopwatch:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def timed() -> float:
        torch.cuda.synchronize()
        start.record()
        several()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / count

    timed()
    return timed


# The clocks of a CUDA device. A CPU has wall_stopwatch alone.
STOPWATCHES = {"device": graph_stopwatch, "host": wall_stopwatch, "loop": loop_stopwatch}
