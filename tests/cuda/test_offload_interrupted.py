"""offload: Ctrl-C at each line and a refused bucket leave nothing half stepped."""

import signal
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import mpkernels
from mpkernels.amp import GradScaler
from mpkernels.optim.plan import Plan
from tests.cuda.offloading import (
    SQUARE,
    are_same,
    assert_same,
    buckets_of,
    in_each_way,
    loss_of,
    offloaded,
    released_or_not,
    trained,
    visible_state,
)

ROOT = Path(mpkernels.__file__).parent


_buckets = buckets_of(64 * 64 * 2)  # one for each SQUARE


def interrupted_at(run, number):
    """Run the call, and raise Ctrl-C at our line of this number, not counting lines where it is held back. Return
    whether there was such a line."""
    left = number

    def at_line(frame, event, argument):
        nonlocal left
        if event == "line" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return at_line

    def at_call(frame, event, argument):
        return at_line if Path(frame.f_code.co_filename).is_relative_to(ROOT / "optim") else None

    sys.settrace(at_call)
    try:
        run()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
        torch.set_grad_enabled(True)  # Ctrl-C at no_grad's last line leaves it off
    return False


@released_or_not
@pytest.mark.parametrize("scaled", [False, True])
def test_ctrl_c_at_each_line_leaves_nothing_half_done(way, released, scaled):
    params, optimizer = offloaded(released=released, shapes=SQUARE[:3], way=way)
    theirs, plain = offloaded(shapes=SQUARE[:3])
    scalers = [GradScaler("cuda", init_scale=4.0) if scaled else None for _ in range(2)]
    trained(optimizer, params, scalers[0]), trained(plain, theirs, scalers[1])
    optimizer.zero_grad(), plain.zero_grad()
    before = visible_state(optimizer, norm=False)
    for scaler, it in zip(scalers, (params, theirs), strict=True):
        loss = loss_of(it, 9)
        (loss if scaler is None else scaler.scale(loss)).backward()
    plain.step() if scalers[1] is None else scalers[1].step(plain)
    wanted = visible_state(plain, norm=False)
    run = optimizer.step if scalers[0] is None else partial(scalers[0].step, optimizer)
    number = breaks = 0
    while True:
        number += 1
        if not interrupted_at(run, number):
            break
        breaks += 1
        found = visible_state(optimizer, norm=False)
        is_done = are_same(found, wanted)
        assert is_done or are_same(found, before), number
        if is_done and scalers[0] is None:
            break
    assert breaks > 50
    assert are_same(visible_state(optimizer, norm=False), wanted)


@pytest.mark.parametrize("bucket", [0, 2, 5])
@released_or_not
def test_ctrl_c_among_the_buckets_comes_after_the_last(monkeypatch, bucket, way, released):
    params, optimizer = offloaded(released=released, way=way, guard=way is True)
    theirs, plain = offloaded(guard=way is True)
    trained(optimizer, params, bad_step=-1), trained(plain, theirs, bad_step=-1)
    step, count = Plan.step, 0

    def pressed(plan, grads, verdict, *rest):
        nonlocal count
        if verdict.found_inf is None:
            if count == bucket:
                signal.raise_signal(signal.SIGINT)
            count += 1
        step(plan, grads, verdict, *rest)

    for it in (optimizer, plain):
        it.zero_grad()
    loss_of(params, 9).backward(), loss_of(theirs, 9).backward()
    plain.step()
    monkeypatch.setattr(Plan, "step", pressed)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert count == len(optimizer._plans[0]._buckets) >= len(SQUARE)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert_same(optimizer, plain, norm=False)


@pytest.mark.parametrize("buckets", [2, 6])
@in_each_way
def test_a_bucket_that_is_refused_leaves_all_unstepped(buckets, way):
    """The last parameter's state has another shape, or its grad another dtype."""
    params, optimizer = offloaded(shapes=SQUARE[:buckets], way=way)
    trained(optimizer, params)
    before = visible_state(optimizer, norm=False)
    for spoil in ("state", "grad"):
        loss_of(params, 9).backward()
        state = optimizer.state[params[-1]]
        kept = state["exp_avg"]
        if spoil == "state":
            state["exp_avg"] = torch.zeros(3)
        else:
            params[-1].grad = None
            params[-1].grad_dtype = None
            params[-1].grad = params[-1].detach().double()
        with pytest.raises((RuntimeError, ValueError, TypeError)):
            optimizer.step()
        state["exp_avg"] = kept
        assert are_same(visible_state(optimizer, norm=False), before)
        optimizer.zero_grad()
