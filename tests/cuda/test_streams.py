"""Side streams, threads, and a host that never waits."""

import math
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from mpkernels.amp import autocast, find_nonfinite
from mpkernels.linear import cast_cache
from mpkernels.optim import AdamW
from tests.cuda.training import CUDA, WAYS, Loop, assert_alike, assert_same, batch, forward, network, on_side


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_training_on_a_side_stream_is_the_same(way):
    with torch.cuda.stream(on_side()):
        got = Loop(CUDA, **way).run().results()
    assert_alike(got, Loop("cpu", **way).run().results())
    assert_same(got, Loop(CUDA, **way).run().results())


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_streams_may_take_turns(way):
    """Each step is on another stream, which waits for the stream before."""
    results = []
    for streams in (None, [on_side() for _ in range(3)]):
        loop, last = Loop(CUDA, **way), torch.cuda.current_stream()
        for step in range(7):
            stream = streams[step % 3] if streams else last
            stream.wait_stream(last)
            with torch.cuda.stream(stream):
                loop.step(batch(step, CUDA), poisons=step == 3)
            last = stream
        torch.cuda.current_stream().wait_stream(last)
        results.append(loop.results())
    assert_same(*results)


def test_a_stream_waits_for_a_cast_that_another_one_makes():
    """Under one autocast, a stream waits for a cast that another stream is making."""
    weight = nn.Parameter(torch.randn(32, 24, device=CUDA))
    torch.cuda.synchronize()
    casts = []
    with autocast("cuda", dtype=torch.bfloat16):
        for stream in (on_side(), on_side()):
            with torch.cuda.stream(stream):
                casts.append(cast_cache.cast(weight, torch.bfloat16))
                if len(casts) == 2:
                    assert torch.equal(casts[1].cpu(), weight.detach().cpu().bfloat16())


def test_the_host_never_waits():
    loops = [Loop(CUDA, max_norm=1.0), Loop(CUDA, unscales=True, clips=True), Loop(CUDA, guard=True)]
    x = batch(0, CUDA)

    def step():
        for loop in loops:
            loop.step(x)
            loop.metrics.read(), loop.scaler.step_was_skipped, loop.optimizer.step_was_skipped
            with find_nonfinite(loop.layers):
                forward(loop.layers, x)

    step()
    torch.cuda.synchronize()
    with warnings.catch_warnings(action="ignore"):
        torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("place", [0, 1], ids=["on a side stream", "on a device that is not the current one"])
def test_an_outcome_is_read_only_after_it_has_arrived(place):
    """Before its arrival, the pinned memory holds arbitrary numbers."""
    if place >= torch.cuda.device_count():
        pytest.skip("there is one CUDA device")
    loop = Loop(torch.device("cuda", place), max_norm=1.0)
    with torch.cuda.stream(on_side()) if place == 0 else nullcontext():
        for step in range(4):
            loop.step(batch(step), poisons=step == 3)
            for _ in range(8):  # polling ends with the right answer
                loop.metrics.read()
            answers = loop.metrics.read(), loop.optimizer.step_was_skipped, loop.scaler.step_was_skipped
            assert step == 3 or all(map(math.isfinite, answers[0].values()))
            assert all(it is None or not bool(it) or step == 3 for it in answers[1:])
    torch.cuda.synchronize(place)
    assert (bool(loop.optimizer.step_was_skipped), bool(loop.scaler.step_was_skipped)) == (True, True)
    assert loop.metrics.read()["skipped_steps"] == 1


def test_released_grads_step_the_same_on_a_side_stream():
    results = []
    for stream in (torch.cuda.current_stream(), on_side()):
        layers = network(CUDA)
        optimizer = AdamW(layers.parameters(), lr=1e-2)
        optimizer.release_grads()
        with torch.cuda.stream(stream):
            for step in range(4):
                forward(layers, batch(step, CUDA)).square().mean().backward()
                optimizer.step()
        torch.cuda.synchronize()
        results.append([param.detach().cpu() for param in layers.parameters()])
    assert all(map(torch.equal, *results))


def test_a_pinned_lr_may_change_after_the_step():
    param = nn.Parameter(torch.ones(4, device=CUDA))
    lr = torch.tensor(0.5).pin_memory()
    optimizer = AdamW([param], lr=lr, weight_decay=0.0)
    param.grad = torch.ones_like(param)
    optimizer.step()
    lr.fill_(100.0)
    torch.testing.assert_close(param.detach().cpu(), torch.full((4,), 0.5))


def test_memory_is_given_back():
    def train():
        Loop(CUDA, max_norm=1.0).run().results()

    train()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    train()
    assert torch.cuda.memory_allocated() <= before
