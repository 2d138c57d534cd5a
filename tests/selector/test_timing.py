"""Ways to compute the same are timed in turns. One that can't run is left out."""

import pytest
import torch

from mpkernels.selector import timing, tune
from mpkernels.selector.timing import time_ways


class Ways:
    """Ways to compute the same. Each advances a fake clock by its number of seconds."""

    def __init__(self, **seconds):
        self.seconds, self.now, self.failing, self.runs = seconds, 0.0, {}, []

    def run(self, name):
        if name in self.failing:
            raise self.failing[name]
        self.now += self.seconds[name]
        self.runs.append(name)


def time_with_a_fake_clock(monkeypatch, ways):
    monkeypatch.setattr(timing, "perf_counter", lambda: ways.now)
    return time_ways(ways, [*ways.seconds], torch.device("cpu"))


@pytest.mark.parametrize(
    ("torchs", "ours", "best"),
    [(1.0, 1.009, "native"), (1.0, 1.011, "torch"), (100e-6, 101.9e-6, "native"), (100e-6, 102.1e-6, "torch")],
)
def test_ours_may_take_one_per_cent_or_two_microseconds_more(monkeypatch, torchs, ours, best):
    assert time_with_a_fake_clock(monkeypatch, Ways(native=ours, torch=torchs)).best == best


def test_the_fastest_of_ours_is_the_best(monkeypatch):
    assert time_with_a_fake_clock(monkeypatch, Ways(native=1.0, triton=0.9, torch=1.0)).best == "triton"


def test_a_hopeless_way_is_run_no_more_than_needed(monkeypatch):
    ways = Ways(native=10, triton=1, torch=20)
    found = time_with_a_fake_clock(monkeypatch, ways)
    assert found.best == "triton"
    assert [*found.seconds] == ["triton", "torch"]  # torch is timed, for the ratios
    assert ways.runs.count("native") == 3  # once untimed, then twice: the faster time counts


@pytest.mark.parametrize(("seconds", "rounds"), [(1.0, timing.FEWEST_ROUNDS), (1e-3, timing.MOST_ROUNDS)])
def test_fast_ways_are_run_more_often(monkeypatch, seconds, rounds):
    ways = Ways(native=seconds, torch=seconds)
    time_with_a_fake_clock(monkeypatch, ways)
    assert ways.runs.count("native") == 3 + rounds  # one untimed and two first runs


def test_a_kernel_that_raises_is_left_out(monkeypatch):
    ways = Ways(native=1, torch=2)
    ways.failing["native"] = RuntimeError("no such chip")
    found = time_with_a_fake_clock(monkeypatch, ways)
    assert found.best == "torch"
    assert found.left_out == {"native": "it can't run here: no such chip"}
    assert "a case: native is left out, for it can't run here" in str(tune.TuneReport({"a case": found}))


@pytest.mark.parametrize(("name", "error"), [("torch", ValueError), ("native", torch.OutOfMemoryError)])
def test_a_wrong_call_or_full_memory_is_no_fault_of_a_kernel(monkeypatch, name, error):
    ways = Ways(native=1, torch=2)
    ways.failing[name] = error()
    with pytest.raises(error):
        time_with_a_fake_clock(monkeypatch, ways)
