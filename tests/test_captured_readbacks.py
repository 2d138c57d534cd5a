"""While a CUDA graph is captured, nobody asks the device for what a warm-up has sent, and nobody frees it."""

import pytest
import torch

from mpkernels import Metrics
from mpkernels.amp import GradScaler
from mpkernels.distributed.processes import Processes
from mpkernels.optim import AdamW
from mpkernels.overflow.readback import Readback
from tests.late_device import DEVICE, late_device

#: What a loop may ask for at the beginning of each iteration.
QUESTIONS = {
    "the optimizer": lambda optimizer, scaler, metrics: optimizer.step_was_skipped,
    "the scaler": lambda optimizer, scaler, metrics: scaler.step_was_skipped,
    "metrics": lambda optimizer, scaler, metrics: metrics.read(),
}


class Loop:
    """Asks, then steps. A grad of inf costs the step."""

    def __init__(self, question="the optimizer", processes=None):
        self.param = torch.nn.Parameter(torch.ones(3).to(DEVICE))
        self.optimizer, self.scaler = AdamW([self.param], guard=True, lr=0.1), GradScaler("cpu", init_scale=4.0)
        self.metrics, self.question = Metrics(self.optimizer, self.scaler), QUESTIONS[question]
        self.optimizer._peers = processes

    def ask(self):
        return self.question(self.optimizer, self.scaler, self.metrics)

    def iterate(self, value=1.0):
        answer = self.ask()
        scale = self.scaler.scale(torch.ones((), device=DEVICE))
        self.param.grad = torch.full_like(self.param, value) * scale
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return answer


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with late_device() as device:
        yield device


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("arrivals", [0, 1, 2], ids=["nothing has arrived", "some has", "all has"])
def test_a_loop_that_asks_is_captured_as_it_is(device, question, arrivals):
    """Warm-up and capture on one stream. What has arrived at the last look is what the capture is told."""
    loop = Loop(question)
    for i in range(2):
        loop.iterate()
        if i < arrivals:
            device.arrive()
    before = loop.ask() if arrivals < 2 else None
    device.is_capturing = True
    answer = loop.iterate()
    device.is_capturing = False
    if arrivals < 2:
        assert answer == before
    loop.iterate()  # would raise in a capture that is void
    device.arrive()
    assert loop.ask() is not None
    assert loop.param.memory.isfinite().all()


@pytest.mark.parametrize("question", QUESTIONS)
def test_after_a_capture_the_newest_step_is_told_again(device, question):
    loop = Loop(question)
    loop.iterate()
    device.arrive()
    device.is_capturing = True
    loop.iterate()
    device.is_capturing = False
    for value, skipped in ((torch.inf, 1), (1.0, 0)):
        loop.iterate(value)
        device.arrive()
        answer = loop.ask()
        assert (answer["skipped_steps"] == 1) if question == "metrics" else (answer.item() == skipped)


@pytest.mark.parametrize("has_arrived", [False, True])
@pytest.mark.parametrize("end", ["send", "forget"])
def test_what_a_capture_makes_outdated_is_freed_after_it(device, has_arrived, end):
    readback = Readback()
    readback.send(torch.ones((), device=DEVICE))
    if has_arrived:
        device.arrive()
        assert readback.read() == 1
    device.is_capturing = True
    for _ in range(3):
        readback.forget() if end == "forget" else readback.send(torch.zeros((), device=DEVICE))
    torch.ones((), device=DEVICE)  # raises if memory was freed
    device.is_capturing = False
    assert len(readback._outdated) == 2
    for _ in range(3):
        readback.send(torch.zeros((), device=DEVICE))
        readback.forget()
    assert len(readback._outdated) == 2  # of the last one alone
    for _ in range(3):
        readback.send(torch.zeros(()))
    assert len(readback._outdated) == 2


class Agreeing(Processes):
    """A group of this process and others that have found nothing, or have failed."""

    def __init__(self, failed=0.0):
        self.group, self.holds_parts, self.failed = None, True, failed

    def agree(self, params, total_sumsq, found_inf, has_failed=False, may_change=False):
        found_inf = torch.zeros((), device=DEVICE) if found_inf is None else found_inf
        failed = torch.full((), self.failed, dtype=torch.float64, device=DEVICE)
        return total_sumsq, torch.maximum(found_inf, failed.float()), failed, torch.zeros_like(failed)

    def device_of(self, params):
        return DEVICE


@pytest.mark.parametrize("warms_up", [False, True])
@pytest.mark.parametrize("question", QUESTIONS)
def test_a_step_of_several_processes_is_captured(device, warms_up, question):
    loop = Loop(question, Agreeing())
    loop.iterate()
    if warms_up:
        loop.iterate()
        device.arrive()
    before = loop.param.memory.clone()
    device.is_capturing = True
    loop.iterate()
    device.is_capturing = False
    assert (loop.param.memory < before).all()
    arrivals = device._arrivals
    loop.iterate()
    assert device._arrivals == arrivals  # nor does the next step wait for what the graph holds


def test_a_failure_of_another_process_before_a_capture_is_told_after_it(device):
    loop = Loop(processes=Agreeing(failed=1.0))
    loop.iterate()
    loop.optimizer._peers.failed = 0.0
    device.is_capturing = True
    loop.iterate()
    device.is_capturing = False
    device.arrive()
    with pytest.raises(RuntimeError, match="has failed in another process"):
        loop.iterate()
