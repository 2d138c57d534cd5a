"""What is timed on a machine that others use, too, and on a device that may hang."""

from itertools import cycle
from types import SimpleNamespace

import pytest
import torch

from mpkernels.selector import timing

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NAMES = ("native", "torch")
FOR_EVER = 1e9


class Trial:
    dtype = torch.float32

    def __init__(self):
        self.runs = []

    def run(self, name):
        self.runs.append(name)
        return []

    def errors(self, results):
        return []


def test_the_faster_wins_though_it_is_held_up_every_second_time(monkeypatch):
    times = {"native": cycle([3e-4]), "torch": cycle([2e-4, 9e-4])}
    monkeypatch.setattr(timing, "_seconds", lambda trial, name, device: next(times[name]))
    assert timing.race(Trial(), NAMES, CPU) == ({"native": 3e-4, "torch": 2e-4}, {})


@pytest.mark.parametrize(("native", "rounds"), [(100, 10), (105, 5)])
def test_a_close_race_is_run_for_longer(monkeypatch, native, rounds):
    """Both take a tenth of a second. Within 3 % of each other they run for two seconds, else as little as they may."""
    milliseconds, now = {"native": native, "torch": 101}, [0.0]

    def run(trial, name, device):
        trial.run(name)
        now[0] += milliseconds[name] / 1e3
        return milliseconds[name] / 1e3

    monkeypatch.setattr(timing, "perf_counter", lambda: now[0])
    monkeypatch.setattr(timing, "_seconds", run)
    trial = Trial()
    timing._times(trial, NAMES, CPU)
    assert trial.runs.count("torch") == 1 + rounds


@pytest.fixture
def device(monkeypatch):
    """Of which a test says how many seconds a kernel's first runs take, and all after them. Each question takes one."""
    device = SimpleNamespace(trial=Trial(), seconds={"native": [0.0], "torch": [0.0]}, now=0.0, done_at=0.0)

    class Event:
        def record(self, stream):
            name = device.trial.runs[-1]
            of_runs = device.seconds[name]
            device.done_at = device.now + of_runs[min(device.trial.runs.count(name), len(of_runs)) - 1]

        def query(self):
            device.now += 1
            return device.now > device.done_at

    def synchronize(_):
        assert device.done_at < FOR_EVER, "waits for what hangs"

    monkeypatch.setattr(timing, "perf_counter", lambda: device.now)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    return device


@pytest.mark.parametrize("seconds", [[FOR_EVER], [0.0, 0.0, 0.0, FOR_EVER]], ids=["at once", "later"])
def test_what_hangs_on_a_device_is_left_out_and_nothing_timed_any_more(device, seconds):
    device.seconds["native"] = seconds
    assert timing.race(device.trial, NAMES, CUDA) == ({}, {"native": "it has not ended after 10 s"})
    assert device.trial.runs[-1] == "native"
    assert device.now < 60


def test_torch_may_take_its_time(device):
    device.seconds |= {"native": [1.0], "torch": [15.0]}
    seconds, left_out = timing.race(device.trial, NAMES, CUDA)
    assert seconds["native"] < 10
    assert left_out == {}
