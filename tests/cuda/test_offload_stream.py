"""offload="stream": each wait is needed, the host waits for nothing, and what can't be had or done is refused."""

import linecache
import sys

import pytest
import torch
from torch import nn

from mpkernels.amp import GradScaler
from mpkernels.optim import AdamW, Masters, Muon
from mpkernels.optim.offload import copies, slots
from tests.cuda.broken_off import CTRL_C, BrokenOffError
from tests.cuda.offloading import (
    F32,
    INT8,
    SQUARE,
    are_same,
    assert_same,
    buckets_of,
    loss_of,
    offloaded,
    parameters,
    size,
    take_step,
    trained,
    visible_state,
)
from tests.cuda.test_offload_copies import Copies
from tests.cuda.training import CUDA
from tests.networks import B16

_buckets = buckets_of(64 * 64 * 10)  # one for each SQUARE; a larger parameter is cut
LARGE = [(64, 300), (300,), *SQUARE]


def pair(**options):
    (params, ours), (theirs, plain) = (offloaded(B16, LARGE, way=way, **options) for way in ("stream", False))
    return params, ours, theirs, plain


WAITS = (
    "wait_event(self._all_left)",
    "wait_event(self._left[k])",
    "wait_event(self._arrived[bucket % self.COUNT])",
    "self.stream.wait_event(torch.cuda.current_stream(self.device).record_event())",
)


def without(line, monkeypatch):
    """Have streams not wait where this line of ours says so. Return a list of the waits left out."""
    wait, left_out = torch.cuda.Stream.wait_event, []

    def wait_event(stream, event):
        frame = sys._getframe(1)
        if line in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
            left_out.append(event)
        else:
            wait(stream, event)

    monkeypatch.setattr(torch.cuda.Stream, "wait_event", wait_event)
    return left_out


@pytest.mark.parametrize("line", WAITS)
def test_a_stream_that_does_not_wait_is_noticed(line, monkeypatch):
    """The lazy stand-in does a stream's work as late as it may, so a copy that isn't waited for comes too late."""
    import importlib.util
    from pathlib import Path

    spec = importlib.util.find_spec("standin_attach")
    if spec is None or not Path(spec.origin).with_name("settings").read_text().startswith("lazy"):
        pytest.skip("on a device that is there, copies may be done early")
    params, ours, theirs, plain = pair(state_dtype=INT8)
    trained(ours, params), trained(plain, theirs)
    assert_same(ours, plain)
    left_out = without(line, monkeypatch)
    for step in range(6):
        for it, its_params in ((plain, theirs), (ours, params)):
            it.zero_grad()
            take_step(it, None, loss_of(its_params, step))
    found = [it.clone() for state in ours.state.values() for it in state.values()]  # while the current stream works
    wanted = [it.cpu() for state in plain.state.values() for it in state.values()]
    assert left_out
    assert not (are_same(found, wanted) and are_same(visible_state(ours), visible_state(plain)))


@pytest.mark.parametrize("scaled", [False, True])
def test_the_host_waits_for_nothing_between_steps(scaled):
    params, optimizer = offloaded(B16, LARGE, way="stream", max_norm=1.0)
    scaler = GradScaler("cuda", init_scale=4.0) if scaled else None
    trained(optimizer, params, scaler)
    losses = [loss_of(params, step, poisons=step == 1) for step in range(3)]
    with CTRL_C.at(1):  # a wait would raise
        for loss in losses:
            optimizer.zero_grad()
            take_step(optimizer, scaler, loss)
    with pytest.raises(BrokenOffError), CTRL_C.at(1):
        optimizer.state  # noqa: B018  # waits


@pytest.mark.parametrize(("state_dtype", "each"), [(INT8, 4 + 8 / 256), (B16, 6), (F32, 10)])
def test_states_alone_travel(state_dtype, each):
    params, optimizer = offloaded(B16, [(640, 300), *SQUARE], way="stream", max_norm=1.0, state_dtype=state_dtype)
    trained(optimizer, params)
    optimizer.zero_grad()
    loss_of(params, 9).backward()
    with Copies() as copies_of_step:
        optimizer.step()
    elements = sum(param.numel() for param in params)
    for moved in copies_of_step.bytes.values():
        assert each * elements <= moved <= 1.005 * each * elements


def test_the_device_keeps_three_buckets_beside_weights_and_grads():
    before = torch.cuda.memory_allocated()
    params, optimizer = offloaded(B16, [(640, 300), *SQUARE], way="stream", max_norm=1.0)
    trained(optimizer, params)
    buckets = len(optimizer._plans[0]._buckets)
    for_kernels = 8192 * buckets  # their tables
    assert buckets > 40
    assert torch.cuda.memory_allocated() - before <= 2 * size(params) + 3 * slots.BUCKET + for_kernels


def test_a_parameter_that_cannot_be_cut_travels_as_a_whole():
    found = []
    for way in ("stream", False):
        base = torch.linspace(-1, 1, 96 * 1024, device=CUDA).to(B16)
        params = [nn.Parameter(it) for it in (base.view(96, 1024).t(), base.clone().view(96, 1024)[:, ::2])]
        params.append(nn.Parameter(torch.linspace(-1, 1, 16384, device=CUDA).to(torch.complex64)))
        optimizer = AdamW(params, lr=0.01, offload=way, state_dtype=INT8)
        for step in range(3):
            for param in params:
                param.grad = torch.full(param.shape, 0.1 * (step + 1), dtype=param.dtype, device=CUDA)
            optimizer.step()
        found.append(optimizer)
    assert_same(*found)


def test_pinned_memory_that_cannot_be_had_is_refused_before_a_change(monkeypatch):
    params, ours, theirs, plain = pair()
    trained(plain, theirs)
    before, empty = [it.detach().clone() for it in params], torch.empty

    def refuses(*arguments, **options):
        if options.get("pin_memory"):
            raise RuntimeError("no memory")
        return empty(*arguments, **options)

    loss_of(params, 0).backward()
    with monkeypatch.context() as patch:
        patch.setattr(copies.torch, "empty", refuses)
        with pytest.raises(RuntimeError, match=r"67108864 bytes more .*ulimit -l"):
            ours.step()
    assert all(map(torch.equal, params, before))
    trained(ours, params)
    assert_same(ours, plain)


def test_a_grad_of_another_shape_is_refused_though_its_parameter_is_cut():
    params, ours, theirs, plain = pair()
    trained(ours, params), trained(plain, theirs)
    params[0].grad = None
    params[0].data = params[0].data.view(300, 64)
    params[0].grad = torch.zeros(300, 64, dtype=B16, device=CUDA)
    params[0].data = params[0].data.view(64, 300)
    with pytest.raises(ValueError, match=r"grads\[0\] must have the states' shape \(64, 300\), got \(300, 64\)"):
        ours.step()
    assert_same(ours, plain)


def test_a_learning_rate_that_is_no_number_leaves_all_unstepped():
    params, ours, theirs, plain = pair()
    for it, its_params in ((ours, params), (plain, theirs)):
        it.add_param_group({"params": parameters(B16, shapes=SQUARE[:1])})
        trained(it, its_params)
        it.zero_grad()
    loss_of(params, 9).backward()
    for param in ours.param_groups[1]["params"]:
        param.grad = torch.zeros_like(param)
    ours.step()
    before = visible_state(ours, norm=False)
    ours.param_groups[1]["lr"] = "fast"
    with pytest.raises(TypeError, match="lr must be a number"):
        ours.step()
    assert are_same(visible_state(ours, norm=False), before)


def test_what_stream_does_not_serve_is_refused():
    params, optimizer = offloaded(way="stream")
    with pytest.raises(ValueError, match="release_grads goes with offload=True, got 'stream'"):
        optimizer.release_grads()
    with pytest.raises(ValueError, match="Muon: offload must be False"):
        Muon(params, offload="stream")
    with pytest.raises(TypeError, match="offload"):
        Masters(torch.optim.SGD(params, lr=0.1), offload="stream")
    with pytest.raises(ValueError, match="offload must be given to the optimizer"):
        optimizer.add_param_group({"params": parameters(B16, shapes=SQUARE[:1]), "offload": False})
    assert "offload: stream" in repr(optimizer)
    assert offloaded(way="cpu")[1].offload is True


def test_an_error_counts_parameters_not_a_bucket_s_alone():
    params, ours = offloaded(B16, LARGE, way="stream")
    trained(ours, params)
    for param in params:
        param.grad = None
        param.grad_dtype = None
    loss_of(params, 9).backward()
    params[3].grad = params[3].detach().double()
    before = visible_state(ours, norm=False)
    with pytest.raises((TypeError, RuntimeError), match=r"\[3\]"):
        ours.step()
    assert are_same(visible_state(ours, norm=False), before)


def test_memory_fits_whichever_parameters_have_grads():
    params, optimizer = offloaded(B16, SQUARE, way="stream")
    for last in (6, 1, 3, 6):
        optimizer.zero_grad()
        loss_of(params[:last], last).backward()
        optimizer.step()
        (its_slots,) = optimizer._offload._slots.values()
        if last == 6:
            memory = its_slots.memory
        assert its_slots.memory is memory
