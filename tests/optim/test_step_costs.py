"""Counts what a step costs: bytes kept, bytes moved, launches, memsets and allocations on the device; the host never
waits."""

from typing import NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mpkernels
from mpkernels.amp import GradScaler
from mpkernels.ops import grad_stats, unscale_
from mpkernels.optim import SGD, Adam, AdamW, Lion
from tests.amp.test_amp_steps import Watch
from tests.networks import B16, F16
from tests.targets import emulated_variable

F32, I8 = torch.float32, torch.int8
SIZE = 256 * 40  # whole blocks of 8-bit moments


def params_of(dtype, sizes=(SIZE,), device="cpu"):
    params = [torch.nn.Parameter(torch.randn(size, device=device).to(dtype)) for size in sizes]
    for param in params:
        param.grad = torch.randn(param.shape, device=device).to(dtype)
    return params


class Traffic(TorchDispatchMode):
    """Counts the bytes of all large tensors that ops get: once for reading, once more for those that they write to.

    Every op that counts here reads each of its arguments once, and each is as large as a parameter or tiny.
    """

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for argument, value in zip(function._schema.arguments, args, strict=False):
            sizes = sum(it.nbytes for it in tree_leaves(value) if isinstance(it, torch.Tensor) and it.numel() >= SIZE)
            self.bytes += sizes * (2 if argument.alias_info and argument.alias_info.is_write else 1)
        return function(*args, **(kwargs or {}))


# dtype, options, and bytes a parameter: those of weight, grad and state together, and those that a step with clipping
# moves under loss scaling.
COSTS = [
    (F32, {}, 16, 32),
    (B16, {}, 14, 28),
    (F16, {}, 14, 28),
    (B16, {"state_dtype": B16}, 10, 20),
    (B16, {"state_dtype": I8}, 8, 16),
    (B16, {"master": "fp32"}, 16, 32),
]
SCALES = 2 * 4 / 256  # of 8-bit moments, a parameter


@pytest.mark.parametrize(("dtype", "options", "kept", "moved"), COSTS, ids=str)
def test_bytes_that_adamw_keeps_and_moves(dtype, options, kept, moved):
    (param,) = params_of(dtype)
    optimizer = AdamW([param], max_norm=1.0, **options)
    optimizer.grad_scale = torch.ones(())
    with mpkernels.backend("reference"):
        optimizer.step()
        with Traffic() as traffic:
            optimizer.step()
    tensors = [param, param.grad, *(value for value in optimizer.state[param].values() if value.dim() > 0)]
    scales = SCALES if "scales" in optimizer.state[param] else 0
    assert sum(tensor.nbytes for tensor in tensors) / SIZE == kept + scales
    assert traffic.bytes / SIZE == moved


@pytest.mark.parametrize(
    ("kind", "options", "states"),
    [(Adam, {}, 2), (SGD, {"momentum": 0.9}, 1), (SGD, {}, 0), (Lion, {}, 1)],
    ids=["adam", "sgd, momentum", "sgd", "lion"],
)
@pytest.mark.parametrize("state_dtype", [F32, B16, I8], ids=str)
@pytest.mark.parametrize("dtype", [F32, B16], ids=str)
def test_bytes_that_each_rule_moves(kind, options, states, dtype, state_dtype):
    """A step with clipping reads the grad twice, and reads and writes 4 bytes of weight, and the states."""
    (param,) = params_of(dtype)
    optimizer = kind([param], max_norm=1.0, state_dtype=state_dtype, **options)
    optimizer.step()
    with mpkernels.backend("reference"), Traffic() as traffic:
        optimizer.step()
    assert traffic.bytes / SIZE == 2 * dtype.itemsize + 8 + 2 * states * state_dtype.itemsize


def test_bytes_that_torch_moves():
    """By the same count, torch.amp's unscale_, clip_grad_norm_ and the fused step move 48."""
    (param,) = params_of(F32)
    optimizer = torch.optim.AdamW([param], fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    optimizer.step()
    with Traffic() as traffic:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_([param], 1.0)
        scaler.step(optimizer)
    never_written = 4  # the grads, though the fused step's schema says so: it writes them only where it unscales them
    assert traffic.bytes / SIZE - never_written == 48


class DeviceWork(NamedTuple):
    """How often our kernels' launchers asked CUDA, or torch's allocator, for each of these."""

    launches: int
    memsets: int = 0
    allocations: int = 0


@pytest.fixture
def device_work(emulated):
    """Return a function that counts what a call gives the emulated device."""
    counters = [emulated_variable(f"emulation_{name}") for name in DeviceWork._fields]

    def count(call):
        before = [it.value for it in counters]
        call()
        return DeviceWork(*(it.value - was for it, was in zip(counters, before, strict=True)))

    return count


ROWS_A_LAUNCH = 369  # launches that take a new plan's rows to the device take so many


@pytest.mark.parametrize(
    ("options", "count", "launches"),
    [
        ({}, 5, 1),
        ({"guard": True, "state_dtype": I8}, 5, 2),
        ({"max_norm": 1.0}, 1, 2),
        ({"max_norm": 1.0}, 148, 2),
        # A launch takes as many addresses as the first case has; the second has one more.
        pytest.param({"max_norm": 1.0}, 3500, 2, marks=pytest.mark.exhaustive),
        pytest.param({"max_norm": 1.0}, 3501, 4, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_a_step_gives_the_device_its_launches_alone(device_work, options, count, launches):
    optimizer = AdamW(params_of(F32, (3,) * count), **options)
    first = device_work(optimizer.step)
    assert first == DeviceWork(launches + -(-count // ROWS_A_LAUNCH), allocations=first.allocations)
    assert device_work(optimizer.step) == DeviceWork(launches)


@pytest.mark.parametrize(("count", "launches"), [(16, 2), (56, 2), (57, 4)])
def test_a_step_of_many_groups_gives_the_device_its_launches_alone(device_work, count, launches):
    params = params_of(F32, (3,) * 2 * count)
    optimizer = AdamW([{"params": params[i::count], "lr": 0.1 / (1 + i)} for i in range(count)], max_norm=1.0)
    optimizer.step()
    assert device_work(optimizer.step) == DeviceWork(launches)


@pytest.mark.parametrize("bad", [1.0, float("inf")], ids=["stepped", "skipped"])
def test_a_step_under_our_scaler_takes_two_launches_also_if_it_is_skipped(device_work, bad):
    """The report on a skipped step takes no launch, memset or allocation."""
    params = params_of(F32, (10, 20_000))
    optimizer, scaler = AdamW(params), GradScaler("cpu")
    for value in (1.0, 1.0, bad):
        scaler.scale(torch.ones(()))
        params[0].grad[3] = value
        step = device_work(lambda: scaler.step(optimizer))
        assert device_work(scaler.update) == DeviceWork(1)
    assert step == DeviceWork(2)
    assert bool(scaler.overflow_report()) == (bad != 1.0)


def test_a_moved_weight_is_taken_to_the_device_once(device_work):
    """The step after the move takes the rows there again, the next one doesn't. Grads may move at every step."""
    params = params_of(F32, (3, 20_000))
    optimizer = AdamW(params, max_norm=1.0)
    optimizer.step()
    for moves in (False, True, False):
        for param in params:
            param.grad = param.grad.clone()
        if moves:
            params[1].data = params[1].data.clone()
        step = device_work(optimizer.step)
        assert step == DeviceWork(2 + moves, allocations=step.allocations)
        assert (step.allocations > 0) == moves


def test_a_channels_last_weight_takes_no_further_launch(device_work):
    """A kernel takes some layouts as they are, so tensors need not be contiguous."""
    param = torch.nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    optimizer = AdamW([param], max_norm=1.0)
    for step in range(3):
        param.grad = torch.randn_like(param)
        assert step == 0 or device_work(optimizer.step) == DeviceWork(2)
        optimizer.step()


@pytest.mark.parametrize(
    ("count", "uploads"),
    [(1, 0), (161, 0), (1355, 2), *(pytest.param(*it, marks=pytest.mark.exhaustive) for it in ((1354, 0), (2709, 3)))],
)
def test_an_op_is_launched_once_for_any_number_of_tensors(device_work, count, uploads):
    """Further launches take the addresses to the device if there are too many for one launch."""
    grads = [torch.ones(1) for _ in range(count)]
    assert device_work(lambda: grad_stats(grads)).launches == 1 + uploads
    assert device_work(lambda: unscale_(grads, torch.zeros(()), torch.ones(()))).launches == 1 + uploads


@pytest.mark.parametrize("dtype", [F32, B16], ids=str)
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_the_host_never_waits_for_the_device(dtype, backend):
    options = {"max_norm": 1.0, "lr": torch.tensor(1e-3), "betas": (torch.tensor(0.9), torch.tensor(0.99))}
    optimizer = AdamW(params_of(dtype, (10, 300)), **options)
    scaler = torch.amp.GradScaler("cpu")
    with mpkernels.backend(backend), Watch():
        for _ in range(3):
            scaler.scale(torch.ones(()))
            optimizer.grad_scale, optimizer.found_inf = scaler._scale, torch.zeros(())
            optimizer.step()
            assert optimizer.step_was_skipped is not None
            assert optimizer.grad_norm is not None
