"""One cast of each parameter in a step of several autocast blocks, and never a stale one."""

import threading

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


def test_once_in_a_step_of_several_blocks(layer):
    assert [count for _, count, _ in accumulated(layer)] == [2, 0, 0] * 2
    with autocast():
        assert cast_cache._block() is None  # the last step's casts are not this block's
    forward(layer)
    layer.weight.data.mul_(2)
    assert_fresh(layer, forward(layer, backward=False))


@pytest.mark.parametrize("make", [optim.AdamW, ThroughData], ids=["ours", "through data"])
def test_each_step_of_a_group_is_seen(layer, make):
    for _, _, y in accumulated(layer, make=make):
        assert_fresh(layer, y)


def is_fresh_from_block_to_block(layer):
    """Without a step under way, each block casts anew, even after a write that raises no version."""
    forward(layer, backward=False)
    layer.weight.data.mul_(-2)
    assert_fresh(layer, forward(layer, backward=False))


def test_groups_that_are_interleaved(layer):
    """Two networks that are trained against each other interleave their groups."""
    other = nn.LinearAct(7, 5)
    for (_, _, y), (_, _, its) in zip(
        accumulated(layer, make=ThroughData), accumulated(other, every=2, make=ThroughData), strict=False
    ):
        assert_fresh(layer, y)
        assert_fresh(other, its)
    is_fresh_from_block_to_block(layer)


def test_a_group_within_a_group(layer):
    for i, (_, _, y) in enumerate(accumulated(layer)):
        assert_fresh(layer, y)
        if i == 1:
            for _, _, its in accumulated(layer, make=ThroughData):
                assert_fresh(layer, its)


def test_a_group_that_is_dropped_while_another_is_under_way(layer):
    old, new = accumulated(layer), accumulated(layer)
    next(old)
    next(new)
    del old
    assert [count for _, count, _ in new] == [0, 0, 2, 0, 0]
    is_fresh_from_block_to_block(layer)


def test_a_group_that_fails(layer):
    def fail():
        for _ in accumulated(layer):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    is_fresh_from_block_to_block(layer)


def test_another_thread_is_in_no_step(layer):
    found = []
    for _ in accumulated(layer):
        thread = threading.Thread(target=lambda: found.append(cast_cache._step()))
        thread.start()
        thread.join()
        assert cast_cache._step() is not None
    assert found == [None] * 6


def test_a_change_within_a_group_is_seen(layer):
    for i, (_, _, y) in enumerate(accumulated(layer)):
        assert_fresh(layer, y)
        if i % 3 == 1:
            with torch.no_grad():
                layer.weight.mul_(2)


def test_a_step_has_the_casts_memory(layer, monkeypatch):
    kept = []
    step = optim.AdamW.step
    monkeypatch.setattr(optim.AdamW, "step", lambda *it: kept.append(len(cast_cache._step())) or step(*it))
    for _ in accumulated(layer):
        assert len(cast_cache._step()) == 2
    assert kept == [0, 0]


def test_a_group_that_is_left_keeps_nothing(layer):
    for _ in accumulated(layer):
        break
    assert cast_cache._step() is None
