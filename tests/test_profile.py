"""mpkernels.profile: phases in the trace, throughput, and the wait for data."""

import contextlib
import json
import time
from collections import UserDict

import pytest
import torch

import mpkernels
from mpkernels import amp, optim, profiling
from tests.networks import batch, network, one_thread  # noqa: F401

PHASES = {"mpkernels.forward", "mpkernels.backward", "mpkernels.step"}


def train(profile, steps=5, model=None, slow=0.0):
    model = model or network()
    optimizer, scaler = optim.AdamW(model.parameters()), amp.GradScaler()

    def loader():
        for seed in range(steps):
            time.sleep(slow)
            yield batch(seed)

    for inputs, targets in profile.batches(loader()):
        loss = (model(inputs) - targets).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def named(trace):
    return [event["name"] for event in json.loads(trace.read_text())["traceEvents"] if "name" in event]


def test_a_trace_names_phases_and_ops(tmp_path):
    with mpkernels.profile(tmp_path / "new" / "trace.json", warmup=0) as profile:
        train(profile)
    names = named(tmp_path / "new" / "trace.json")
    assert {phase: names.count(phase) for phase in PHASES} == dict.fromkeys(PHASES, 5)
    assert "mpkernels::unscale_" in names
    assert "mpkernels::update_scale_" in names
    assert "samples/s" in profile.table()
    assert "mpkernels.step" in profile.table()


def test_ranges_for_nsight_open_and_close_in_pairs(tmp_path, monkeypatch):
    """Nsight gets ranges if there is a GPU; here torch is made to claim one."""
    seen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: seen.append(name))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append("end"))
    monkeypatch.setattr(profiling.profiler, "profile", lambda **_: contextlib.nullcontext())
    model = network()
    optimizer = optim.AdamW(model.parameters())
    inputs, targets = batch(0)
    with mpkernels.profile(tmp_path / "trace.json"):
        for _ in range(2):
            with pytest.raises(RuntimeError):
                model(targets)  # of another size; the loop goes on
            (model(inputs) - targets).square().mean().backward()
            optimizer.step()
    with pytest.raises(ZeroDivisionError) as error, mpkernels.profile(tmp_path / "trace.json"):
        optimizer.step(lambda: 1 / 0)
    step = ["mpkernels.forward", "end", "mpkernels.backward", "end", "mpkernels.step", "end"]
    assert seen == [*["mpkernels.forward", "end", *step] * 2, "mpkernels.step", "end"], error  # which holds the frames


def test_a_directory_is_for_tensorboard(tmp_path):
    with mpkernels.profile(tmp_path / "runs") as profile:
        train(profile)
    (trace,) = (tmp_path / "runs").glob("*.pt.trace.json")
    assert set(named(trace)) >= PHASES


def test_throughput_leaves_the_warmup_out_and_sees_the_wait():
    with mpkernels.profile(warmup=2) as profile:
        train(profile, steps=8, slow=0.05)
    assert (profile.steps, profile.samples) == (6, 6 * 64)
    assert profile.waited >= 6 * 0.05
    assert profile.seconds >= profile.waited
    assert profile.data_wait == profile.waited / profile.seconds
    assert profile.samples_per_second == profile.samples / profile.seconds


def test_nothing_stays_behind(tmp_path):
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


def test_a_loop_that_ends_early_or_never_begins():
    with mpkernels.profile() as profile:
        for _ in profile.batches([]):
            raise AssertionError
    assert (profile.samples_per_second, profile.data_wait) == (None, None)
    assert profile.table() == ""
    with mpkernels.profile(warmup=0) as profile:
        for _ in profile.batches([torch.ones(3)] * 5):
            break
    assert profile.steps == 1
    assert profile.samples_per_second > 0


def test_a_loop_that_ends_within_the_warmup_has_measured_nothing():
    with mpkernels.profile(warmup=20) as profile:
        train(profile, steps=8)
    assert (profile.steps, profile.samples_per_second, profile.data_wait) == (0, None, None)
    assert profile.table() == "throughput was not measured: 8 batches came, and warmup=20"


@pytest.mark.parametrize("warmup", [-1, 1.5])
def test_warmup_is_a_count(warmup):
    text = rf"^profile: warmup must be a whole number from 0 on, got {warmup}$"
    with pytest.raises(ValueError, match=text), mpkernels.profile(warmup=warmup):
        pass


def test_a_loop_that_breaks_off_leaves_its_trace(tmp_path):
    def loop():
        with mpkernels.profile(tmp_path / "trace.json"):
            torch.ones(3).cumsum(0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    assert "cumsum" in (tmp_path / "trace.json").read_text()


def test_batches_of_any_mapping():
    """Tokenizers return such mappings."""
    rows = UserDict(ids=torch.zeros(8, 2), mask=torch.zeros(8, 2))
    with mpkernels.profile(warmup=0) as profile:
        for _ in profile.batches([rows] * 5):
            pass
    assert profile.samples == 40
