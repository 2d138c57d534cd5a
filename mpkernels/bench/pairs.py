"""Two ways to do the same, timed in turns, so that whatever else the machine does slows down both."""

from collections.abc import Callable
from math import comb
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch

FEWEST_SAMPLES = 6  # that have a 95 % interval of the median, from the least to the greatest
BUILDS = 3  # unless one takes long: where the data happens to lie matters, too
MOST_SAMPLES = 101  # more would only fill the results' file: a sample of a short run is the mean of several turns
RUNS_IN_GRAPH = 20  # the shortest kernels take 3 us, and the way from an event to a kernel about as long
STEPS_IN_LOOP = 3
WIDE, BUSY = 0.1, 0.05  # above these, samples are in doubt

Workload = Callable[[], object]
Make = Callable[[], Workload]  # builds what a workload needs; each of the two can be built and looked at alone
Stopwatch = Callable[[], float]


class Pair(NamedTuple):
    """``ours`` and ``theirs`` leave the data as they found it, or it would overflow or go denormal after many runs."""

    ours: Make
    theirs: Make
    calls: int = 1  # of the op, in each run
    moved: int = 0  # bytes that a call of ours has to read and write
    flops: int = 0  # of a call
    clock: str = "device"
    is_counted: bool = False  # its memory, launches and waits, too


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
        """Their time over ours, sample by sample. Above 1, ours is faster."""
        return median_interval([theirs / ours for ours, theirs in zip(self.ours, self.theirs, strict=True)])

    def doubts(self) -> list[str]:
        low, middle, high = self.ratio()
        return ["wide"] * (high - low > WIDE * middle) + ["busy"] * (self.waited > BUSY)


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


def measure(pair: Pair, device: str, seconds: float, builds: int = BUILDS) -> Samples:
    """A sample is of both orders, for who comes after the other finds another cache than who comes after itself."""
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
        del stopwatches, stopwatch  # and the memory
        if is_last:
            break
    waited += seconds_waited()
    return Samples(*samples, waited / (perf_counter() - start))


def seconds_waited() -> float:
    """What this process's threads have spent ready to run, but not running. Linux only; elsewhere always 0."""
    return sum(int(thread.read_text().split()[1]) for thread in Path("/proc/self/task").glob("*/schedstat")) / 1e9


def wall_stopwatch(run: Workload) -> Stopwatch:
    # With a GPU each run starts on an empty queue, for the host must never wait for a full one.
    settle = torch.cuda.synchronize if torch.cuda.is_available() else int

    def timed() -> float:
        settle()
        start = perf_counter()
        run()
        return perf_counter() - start

    timed()
    return timed


def graph_stopwatch(run: Workload) -> Stopwatch:
    """Events around a CUDA graph of several runs: what the host does meanwhile is not in it."""
    run()  # compiles and loads kernels, which can't be captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(RUNS_IN_GRAPH):
            run()
    held = graph, run  # whose tensors the graph reads, but doesn't own
    return _between_events(lambda: held[0].replay(), RUNS_IN_GRAPH)


def loop_stopwatch(run: Workload) -> Stopwatch:
    """Events around a few runs as a training loop has them, one queued behind the other, the host's work included."""

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


# On CUDA; on a CPU there is but one time.
STOPWATCHES = {"device": graph_stopwatch, "host": wall_stopwatch, "loop": loop_stopwatch}
