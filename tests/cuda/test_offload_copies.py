"""offload=True: what is copied, kept and pinned, and what runs beside what."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mpkernels.amp import GradScaler
from mpkernels.optim import AdamW
from mpkernels.optim.plan import Plan
from tests.cuda.offloading import (
    F32,
    INT8,
    SQUARE,
    buckets_of,
    loss_of,
    offloaded,
    parameters,
    size,
    trained,
    visible_state,
)
from tests.hard_grads import same_bits
from tests.networks import B16

_buckets = buckets_of(64 * 64 * 2)  # one for each SQUARE


class Copies(TorchDispatchMode):
    """Counts bytes copied between a device and the host, in copies of more than a few numbers."""

    def __init__(self):
        super().__init__()
        self.bytes = {"cuda": 0, "cpu": 0}  # by target

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function is torch.ops.aten.copy_.default:
            to, source = arguments[:2]
            if to.device.type != source.device.type and to.numel() > 8:
                assert (to if to.device.type == "cpu" else source).is_pinned()
                self.bytes[to.device.type] += size([to])
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("dtype", [F32, B16])
@pytest.mark.parametrize("state_dtype", [F32, INT8])
def test_grads_and_weights_alone_travel(dtype, state_dtype, released):
    params, optimizer = offloaded(dtype, released=released, max_norm=1.0, state_dtype=state_dtype)
    trained(optimizer, params)
    optimizer.zero_grad()
    loss = loss_of(params, 9)
    with Copies() as in_backward:
        loss.backward()
    with Copies() as in_step:
        optimizer.step()
    weights = size(params)
    assert in_backward.bytes == {"cuda": 0, "cpu": weights if released else 0}
    assert in_step.bytes == {"cuda": weights, "cpu": 0 if released else weights}


@pytest.mark.parametrize("released", [False, True])
def test_a_skipped_step_copies_nothing(released):
    params, optimizer = offloaded(released=released, max_norm=1.0)
    trained(optimizer, params)
    optimizer.zero_grad()
    loss_of(params, 9, poisons=True).backward()
    before = visible_state(optimizer)[:-2]
    with Copies() as copies:
        optimizer.step()
    assert copies.bytes == {"cuda": 0, "cpu": 0}
    assert all(map(same_bits, visible_state(optimizer)[:-2], before))


@pytest.mark.parametrize("released", [False, True])
def test_the_device_keeps_the_weights_alone(released):
    """Released grads lie on the device only until they are copied."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    params, optimizer = offloaded(released=released, max_norm=1.0, shapes=[(128, 128)] * 12)
    weights, few = size(params), 16384  # numbers
    trained(optimizer, params)
    optimizer.zero_grad()
    assert torch.cuda.memory_allocated() - before <= weights + few
    terms = [param.float().sum() for param in params]
    torch.cuda.reset_peak_memory_stats()
    for term in terms:  # several terms, so that grads come one after another as in a deep network
        term.backward()
    optimizer.step()
    grad_bytes = 2 * size(params[:1]) if released else weights
    backward_bytes = 6 * size(params[:1])  # autograd's own temporary tensors
    assert torch.cuda.max_memory_allocated() - before <= weights + grad_bytes + backward_bytes + few


def test_pinned_memory_is_allocated_once(monkeypatch):
    found, pinned = [], torch.empty

    def empty(*arguments, **options):
        if options.get("pin_memory"):
            found.append(arguments[0])
        return pinned(*arguments, **options)

    monkeypatch.setattr(torch, "empty", empty)
    params, optimizer = offloaded(max_norm=1.0)
    trained(optimizer, params)
    assert found == [64 << 20, 8192, 8192, 8192]  # twins, and three slices
    trained(optimizer, params)
    assert len(found) == 4


class Watch:
    """Notes what is on its way whenever a bucket is stepped."""

    def __init__(self, monkeypatch, optimizer):
        self.notes, step = [], Plan.step
        (self.lane,) = optimizer._offload.twins._lanes.values()
        self.slices = optimizer._offload._slices

        def noted(plan, grads, verdict, *rest):
            if verdict.found_inf is None:  # no rehearsal
                is_asked = len(self.notes) in (1, 2, 3)  # polled until true
                self.notes.append((sorted(self.slices._events), is_asked and self.lane.stream.query()))
            step(plan, grads, verdict, *rest)

        monkeypatch.setattr(Plan, "step", noted)


def test_copies_run_beside_the_steps_of_other_buckets(monkeypatch):
    """While the host steps a bucket, copies of the next two are on their way, and nobody waits for stepped weights."""
    if importlib.util.find_spec("standin_attach") is None:
        pytest.skip("on a device that is there, copies may be done early")
    params, optimizer = offloaded(guard=False)
    trained(optimizer, params, bad_step=-1)
    watch = Watch(monkeypatch, optimizer)
    waits = []
    for kind in (torch.cuda.Event, torch.cuda.Stream):
        synchronize = kind.synchronize
        monkeypatch.setattr(kind, "synchronize", lambda it, to=synchronize: (waits.append(it), to(it)))
    optimizer.zero_grad()
    loss_of(params, 9).backward()
    optimizer.step()
    assert [on_the_way for on_the_way, _ in watch.notes] == [[1, 2], [2, 3], [3, 4], [4, 5], [5], []]
    if Path(importlib.util.find_spec("standin_attach").origin).with_name("settings").read_text().startswith("lazy"):
        assert not any(done for _, done in watch.notes)  # copies of weights to the device
    assert len(waits) == 1 + len(SQUARE)  # for the last step's weights, and for the grads of each bucket


@pytest.mark.parametrize("released", [False, True])
def test_the_overflow_report_is_as_without_offload(released):
    params, theirs = parameters(B16), parameters(B16)
    found = []
    for it, options in ((params, {"offload": True}), (theirs, {})):
        optimizer, scaler = AdamW(it, lr=0.01, **options), GradScaler("cuda", init_scale=4.0)
        if options and released:
            optimizer.release_grads(scaler)
        trained(optimizer, it, scaler, bad_step=3)
        found.append((str(scaler.overflow_report()), optimizer.overflow_report().as_dict(), scaler.get_scale()))
        assert optimizer.step_was_skipped
    assert found[0] == found[1]
    assert "params[2]" in found[0][0] or "1" in found[0][0]
