"""mpkernels.profile: phases in the trace, throughput, and the wait for data."""

import contextlib
import json
from collections import UserDict

import pytest
import torch

import mpkernels
from mpkernels import amp, optim, profiling
from tests.networks import batch, network, one_thread  # noqa: F401

PHASES = {"mpkernels.forward", "mpkernels.backward", "mpkernels.step"}


def train(profile, steps=5):
    model = network()
    optimizer, scaler = optim.AdamW(model.parameters()), amp.GradScaler()

    for inputs, targets in profile.batches(map(batch, range(steps))):
        loss = (model(inputs) - targets).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def names_in(trace):
    return [event["name"] for event in json.loads(trace.read_text())["traceEvents"] if "name" in event]


def test_a_trace_names_phases_and_ops(tmp_path):
    with mpkernels.profile(tmp_path / "new" / "trace.json", warmup=0) as profile:
        train(profile)
    names = names_in(tmp_path / "new" / "trace.json")
    assert {phase: names.count(phase) for phase in PHASES} == dict.fromkeys(PHASES, 5)
    assert "mpkernels::unscale_" in names
    assert "mpkernels::update_scale_" in names


def test_ranges_for_nsight_open_and_close_in_pairs(tmp_path, monkeypatch):
    """Nsight gets ranges if there is a GPU; here torch is made to claim one."""
    ranges = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: ranges.append(name))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: ranges.append("end"))
    monkeypatch.setattr(torch.profiler, "profile", lambda **_: contextlib.nullcontext())
    model = network()
    optimizer = optim.AdamW(model.parameters())
    inputs, targets = batch(0)
    with mpkernels.profile(tmp_path / "trace.json"):
        for _ in range(2):
            with pytest.raises(RuntimeError):
                model(targets)  # a size that doesn't fit; the loop goes on
            (model(inputs) - targets).square().mean().backward()
            optimizer.step()
    with pytest.raises(ZeroDivisionError) as error, mpkernels.profile(tmp_path / "trace.json"):
        optimizer.step(lambda: 1 / 0)
    step = ["mpkernels.forward", "end", "mpkernels.backward", "end", "mpkernels.step", "end"]
    assert ranges == [*["mpkernels.forward", "end", *step] * 2, "mpkernels.step", "end"], error  # it holds the frames


@pytest.fixture
def sleep(monkeypatch):
    """Return a function that moves the clock, which stands still otherwise."""
    now = [0.0]
    monkeypatch.setattr(profiling.time, "perf_counter", lambda: now[0])
    return lambda seconds: now.append(now.pop() + seconds)


def test_throughput_leaves_the_warmup_out_and_counts_waits_for_data(sleep):
    def loader():
        for seconds in (50, 60, *[1] * 5):
            sleep(seconds)
            yield batch(0)

    with mpkernels.profile(warmup=2) as profile:
        for _ in profile.batches(loader()):
            sleep(3)
    assert (profile.samples_per_second, profile.data_wait) == (64 / 4, 1 / 4)


def test_no_hook_stays_behind(tmp_path):
    from torch.nn.modules import module
    from torch.optim import optimizer

    def hooks():
        return (
            torch.autograd.backward,
            *map(len, (module._global_forward_hooks, module._global_forward_pre_hooks)),
            *map(len, (optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks)),
        )

    before = hooks()
    with contextlib.suppress(KeyError), mpkernels.profile(tmp_path / "broken-off.json"):
        assert hooks() != before
        raise KeyError
    assert hooks() == before
    with mpkernels.profile():
        assert hooks() == before


@pytest.mark.parametrize("count", [0, 3, 8, 20])
def test_a_loop_that_ends_within_the_warmup_has_measured_nothing(count):
    with mpkernels.profile(warmup=20) as profile:
        train(profile, count)
    assert (profile.samples_per_second, profile.data_wait) == (None, None)


def test_a_loop_that_ends_early_is_measured(sleep):
    with mpkernels.profile(warmup=0) as profile:
        for _ in profile.batches([torch.ones(3)] * 5):
            sleep(2)
            break
    assert (profile.samples_per_second, profile.data_wait) == (1.5, 0)


def test_a_loop_that_breaks_off_leaves_its_trace(tmp_path):
    def loop():
        with mpkernels.profile(tmp_path / "trace.json"):
            torch.ones(3).cumsum(0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    assert "cumsum" in (tmp_path / "trace.json").read_text()


def test_batches_may_be_any_mapping(sleep):
    """Tokenizers return mappings that are no dicts."""
    rows = UserDict(ids=torch.zeros(8, 2), mask=torch.zeros(8, 2))
    with mpkernels.profile(warmup=0) as profile:
        for _ in profile.batches([rows] * 5):
            sleep(2)
    assert profile.samples_per_second == 4
