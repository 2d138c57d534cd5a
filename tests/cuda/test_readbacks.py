"""Numbers that a step sends to the host are read after they have arrived, and not polled or freed in a capture."""

import pytest
import torch
from torch import nn

from mpkernels import Metrics
from mpkernels.amp import GradScaler
from mpkernels.distributed import processes
from mpkernels.optim import AdamW
from mpkernels.optim.readback import Readback
from tests.cuda.training import CUDA, captured


@pytest.fixture
def readback():
    return Readback()


def on_device(value):
    return torch.full((), value, device=CUDA)


def test_a_value_from_the_host_replaces_one_that_is_on_its_way(readback):
    readback.send(on_device(1.0))
    readback.send(torch.zeros(()))
    torch.cuda.synchronize()
    assert readback.read() == 0


def test_the_newest_of_several_arrived_values_is_read(readback):
    for value in range(3):
        readback.send(on_device(float(value)))
    torch.cuda.synchronize()
    assert readback.read() == 2


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("has_arrived", [False, True])
@pytest.mark.parametrize("end", ["send", "forget"])
def test_memory_that_a_capture_outdates_is_freed_after_it(readback, has_arrived, end):
    readback.send(on_device(1.0))
    if has_arrived:
        torch.cuda.synchronize()
        assert readback.read() == 1
    value = on_device(0.0)

    def replace():
        for _ in range(3):
            readback.forget() if end == "forget" else readback.send(value)

    captured(replace)  # raises if pinned memory is freed
    assert len(readback._outdated) == 2
    for _ in range(3):
        readback.send(value)
        readback.forget()
    assert len(readback._outdated) == 2  # those of the last capture alone
    for _ in range(3):
        readback.send(torch.zeros(()))
    assert len(readback._outdated) == 2


def parameter():
    param = nn.Parameter(torch.ones(3, device=CUDA))
    param.grad = torch.ones_like(param)
    return param


def stepped(optimizer, grad=1.0):
    [param] = optimizer.param_groups[0]["params"]
    param.grad.fill_(grad)
    optimizer.step()


def test_a_captured_skip_is_seen_though_the_warm_up_was_still_on_its_way():
    optimizer = AdamW([parameter()], guard=True)
    stepped(optimizer)
    captured(lambda: stepped(optimizer, torch.inf)).replay()
    torch.cuda.synchronize()
    assert optimizer.step_was_skipped.item() == 1
    stepped(optimizer)
    torch.cuda.synchronize()
    assert optimizer.step_was_skipped.item() == 0


@pytest.mark.parametrize("arrivals", [0, 1, 2], ids=["nothing has arrived", "some has", "all has"])
@pytest.mark.parametrize("question", ["the optimizer", "the scaler", "metrics"])
def test_a_loop_that_asks_for_the_last_outcome_can_be_captured(question, arrivals):
    """Warm-up and capture are on one stream. The capture reads what had arrived at the last poll."""
    optimizer, scaler = AdamW([parameter()], guard=True, lr=0.1), GradScaler("cuda", init_scale=4.0)
    metrics = Metrics(optimizer, scaler)
    ask = {
        "the optimizer": lambda: optimizer.step_was_skipped,
        "the scaler": lambda: scaler.step_was_skipped,
        "metrics": metrics.read,
    }[question]
    answers = []

    def iterate(value=1.0):
        answers.append(ask())
        scaled_grad = scaler.scale(on_device(value))
        [param] = optimizer.param_groups[0]["params"]
        param.grad.copy_(scaled_grad.expand_as(param))
        scaler.step(optimizer)
        scaler.update()

    for step in range(2):
        iterate()
        if step < arrivals:
            torch.cuda.synchronize()
    before = ask() if arrivals < 2 else None
    captured(iterate)
    assert arrivals == 2 or answers[-1] == before
    for value, skipped in ((torch.inf, 1), (1.0, 0)):  # outcomes of eager steps arrive again
        iterate(value)
        torch.cuda.synchronize()
        answer = ask()
        assert (answer["skipped_steps"] == 1) if question == "metrics" else (answer.item() == skipped)


def test_metrics_come_in_order_and_under_their_own_names():
    """A step may have fewer numbers than the step before it."""
    optimizer = AdamW([parameter()], max_norm=1.0)
    metrics = Metrics(optimizer)
    stepped(optimizer)
    torch.cuda.synchronize()
    first = metrics.read()
    assert first.keys() == {"grad_norm", "skipped_steps"}
    optimizer.max_norm, optimizer.guard = None, False
    stepped(optimizer)
    assert metrics.read() in (first, {}, {"skipped_steps": 0.0})  # it may be on its way
    torch.cuda.synchronize()
    assert metrics.read() == {"skipped_steps": 0.0}


def test_metrics_hold_a_scale_that_lies_on_the_host():
    optimizer, scaler = AdamW([parameter()], guard=True), GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    metrics = Metrics(optimizer, scaler)
    stepped(optimizer)
    assert metrics.read().get("loss_scale", 4) == 4
    torch.cuda.synchronize()
    assert metrics.read()["loss_scale"] == 4


def test_metrics_do_not_follow_a_captured_step():
    optimizer = AdamW([parameter()], guard=True)
    metrics = Metrics(optimizer)
    graph = captured(lambda: stepped(optimizer))
    graph.replay()
    torch.cuda.synchronize()
    assert metrics.read() == {}


def test_agreeing_can_be_captured_in_a_process_without_grads():
    captured(lambda: processes._number(0.0, CUDA))
