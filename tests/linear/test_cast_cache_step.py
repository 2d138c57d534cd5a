"""In a step of several autocast blocks, the cache casts each parameter once, and never returns a stale cast."""

import threading
from contextlib import suppress

import pytest
import torch

from mpkernels import amp, nn, optim
from mpkernels.linear import cast_cache
from tests.cast_counts import Casts, ThroughData, assert_fresh, autocast, forward


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return nn.LinearAct(7, 5)


def accumulated(layer, every=3, make=optim.AdamW):
    """Yield the micro-batches of two groups, with each forward's count of casts and its result."""
    optimizer = make(layer.parameters())
    for micro in amp.accumulate(range(2 * every), every, optimizer):
        with Casts(*(it.shape for it in layer.parameters())) as casts, autocast():
            y = layer(torch.ones(3, 7))
        yield micro, casts.count, y.detach()
        micro.backward(y.float().square().sum())


def test_a_parameter_is_cast_once_in_a_step_of_several_blocks(layer):
    assert [count for _, count, _ in accumulated(layer)] == [2, 0, 0] * 2
    with autocast():
        assert cast_cache._block() is None  # the last step's casts are not this block's
    forward(layer)
    layer.weight.data.mul_(2)
    assert_fresh(layer, forward(layer, backward=False))


@pytest.mark.parametrize("make", [optim.AdamW, ThroughData], ids=["ours", "through data"])
def test_the_forward_after_a_groups_step_uses_the_new_weights(layer, make):
    for _, _, y in accumulated(layer, make=make):
        assert_fresh(layer, y)


def assert_fresh_from_block_to_block(layer):
    """Assert that outside of a step each block casts anew, even after a write that raises no version."""
    forward(layer, backward=False)
    layer.weight.data.mul_(-2)
    assert_fresh(layer, forward(layer, backward=False))


def test_interleaved_groups_use_fresh_casts(layer):
    """Two networks that are trained against each other interleave their groups."""
    other = nn.LinearAct(7, 5)
    for (_, _, y), (_, _, other_y) in zip(
        accumulated(layer, make=ThroughData), accumulated(other, every=2, make=ThroughData), strict=False
    ):
        assert_fresh(layer, y)
        assert_fresh(other, other_y)
    assert_fresh_from_block_to_block(layer)


def test_a_group_within_a_group_uses_fresh_casts(layer):
    for i, (_, _, y) in enumerate(accumulated(layer)):
        assert_fresh(layer, y)
        if i == 1:
            for _, _, inner_y in accumulated(layer, make=ThroughData):
                assert_fresh(layer, inner_y)


def test_a_group_that_is_dropped_ends_no_other_groups_step(layer):
    old, new = accumulated(layer), accumulated(layer)
    next(old)
    next(new)
    del old
    assert [count for _, count, _ in new] == [0, 0, 2, 0, 0]
    assert_fresh_from_block_to_block(layer)


def test_another_thread_is_in_no_step(layer):
    found = []
    for _ in accumulated(layer):
        thread = threading.Thread(target=lambda: found.append(cast_cache._thread.step))
        thread.start()
        thread.join()
        assert cast_cache._thread.step is not None
    assert found == [None] * 6


def test_a_change_within_a_group_counts(layer):
    for i, (_, _, y) in enumerate(accumulated(layer)):
        assert_fresh(layer, y)
        if i % 3 == 1:
            with torch.no_grad():
                layer.weight.mul_(2)


def test_the_casts_are_freed_before_the_optimizer_steps(layer, monkeypatch):
    kept = []
    step = optim.AdamW.step
    monkeypatch.setattr(optim.AdamW, "step", lambda *given: kept.append(len(cast_cache._thread.step)) or step(*given))
    for _ in accumulated(layer):
        assert len(cast_cache._thread.step) == 2
    assert kept == [0, 0]


@pytest.mark.parametrize("fails", [True, False])
def test_a_group_that_is_left_early_keeps_no_cast(layer, fails):
    with suppress(ZeroDivisionError):
        for _ in accumulated(layer):
            if fails:
                raise ZeroDivisionError
            break
    assert cast_cache._thread.step.is_over
    assert_fresh_from_block_to_block(layer)
