"""Metrics gives loggers their numbers, and the host never waits."""

import json

import pytest
import torch

from mpkernels import Metrics
from mpkernels.amp import GradScaler
from mpkernels.optim import AdamW
from tests.networks import backward, network, one_thread

__all__ = ["one_thread"]  # a fixture that each test uses


def parameter(place="cpu"):
    return torch.nn.Parameter(torch.ones(3).to(place))


def step(optimizer, scaler, value):
    """Take one step with a grad of these values, times the scale."""
    [param] = optimizer.param_groups[0]["params"]
    scale = scaler.scale(torch.ones((), device=param.device))
    param.grad = torch.full_like(param, value) * scale
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("kind", [GradScaler, torch.amp.GradScaler])
def test_metrics_are_those_of_the_newest_step(kind):
    """The scale is the one that the step used. A skipped step is counted at once."""
    optimizer, scaler = AdamW([parameter()], max_norm=1.0), kind("cpu", init_scale=8.0, growth_interval=1)
    metrics, found = Metrics(optimizer, scaler), []
    assert metrics.read() == {}
    for value in (1.0, torch.inf, 2.0):
        step(optimizer, scaler, value)
        found.append(metrics.read())
    norm = 3**0.5
    assert [it["loss_scale"] for it in found] == [8.0, 16.0, 8.0]
    assert [it["skipped_steps"] for it in found] == [0.0, 1.0, 1.0]
    assert [found[0]["grad_norm"], found[2]["grad_norm"]] == pytest.approx([norm, 2 * norm])
    assert not torch.tensor(found[1]["grad_norm"]).isfinite()


def test_what_a_step_does_not_compute_is_left_out():
    model = network()
    optimizer = AdamW(model.parameters())
    metrics = Metrics(optimizer, GradScaler("cpu", enabled=False))
    backward(model, 0)
    optimizer.step()
    assert metrics.read() == {}
    optimizer.guard = True
    optimizer.step()
    assert metrics.read().keys() == {"grad_norm", "skipped_steps"}
    optimizer.guard = False
    optimizer.step()
    assert metrics.read().keys() == {"skipped_steps"}


def test_earlier_numbers_do_not_get_the_names_of_later_ones(monkeypatch):
    """On a GPU, the later ones may be on their way."""
    model = network()
    optimizer = AdamW(model.parameters(), guard=True)
    metrics = Metrics(optimizer)
    backward(model, 0)
    optimizer.step()
    assert metrics.read().keys() == {"grad_norm", "skipped_steps"}
    monkeypatch.setattr(metrics._readback, "send", lambda value: None)
    optimizer.guard = False
    optimizer.step()
    assert metrics.read() == {}


def test_loggers_and_torchs_profiler_take_metrics(tmp_path):
    """Metrics are plain floats, and their names need no escape."""
    optimizer, scaler = AdamW([parameter()]), GradScaler("cpu")
    metrics = Metrics(optimizer, scaler)
    with torch.profiler.profile() as profiler:
        step(optimizer, scaler, 1.0)
        profiler.add_metadata_json("mpkernels", json.dumps(metrics.read()))
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["mpkernels"] == metrics.read()
    assert {type(it) for it in metrics.read().values()} == {float}
    assert any("mpkernels::adamw_" in event.get("name", "") for event in trace["traceEvents"])


def test_removed_metrics_follow_no_further_steps():
    optimizer, scaler = AdamW([parameter()]), GradScaler("cpu")
    metrics = Metrics(optimizer, scaler)
    metrics.remove()
    step(optimizer, scaler, 1.0)
    assert metrics.read() == {}


def test_bad_arguments_are_named():
    optimizer = AdamW([parameter()])
    with pytest.raises(TypeError, match=r"^Metrics: optimizer must be one of mpkernels.optim, got torch.optim.sgd"):
        Metrics(torch.optim.SGD([parameter()]))
    with pytest.raises(TypeError, match=r"^Metrics: scaler must be a torch.amp.GradScaler or None, got float$"):
        Metrics(optimizer, 65536.0)
    assert not optimizer._optimizer_step_post_hooks
