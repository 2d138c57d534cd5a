"""Devices other than the current one, several at once, and the CPU beside them."""

import threading

import pytest
import torch
from torch import nn

from mpkernels.functional import gated_linear, linear_act
from mpkernels.optim import AdamW
from tests.cuda.training import CUDA, WAYS, Loop, assert_alike, batch, forward, network, on_side

OTHER = torch.device("cuda", 1)
PLACES = [(OTHER,), (CUDA, OTHER), (OTHER, CUDA), ("cpu", OTHER), (CUDA, "cpu")]


@pytest.mark.parametrize("places", PLACES, ids=str)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_training_on_any_places_is_as_on_a_cpu(devices, places, way):
    assert_alike(Loop(*places, **way).run().results(), Loop("cpu", **way).run().results())


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("with_side", [CUDA, OTHER], ids=["the current device's", "the other's"])
def test_work_goes_to_the_current_stream_of_its_device(devices, with_side, way):
    """Work for a device goes to that device's current stream, even if another device is current."""
    with torch.cuda.stream(on_side(with_side)), torch.cuda.device(CUDA):
        got = Loop(OTHER, **way).run().results()
    assert_alike(got, Loop("cpu", **way).run().results())


CALLS = {
    "linear_act": lambda x, w, v: linear_act(x, w, None, "gelu_tanh"),
    "gated_linear": lambda x, w, v: gated_linear(x, w, v, activation="silu"),
}


@pytest.mark.parametrize("call", CALLS)
def test_an_op_runs_on_another_device_than_the_current_one(devices, call):
    arguments = batch(0), torch.randn(16, 24), torch.randn(16, 24)
    got = CALLS[call](*(it.to(OTHER) for it in arguments))
    assert (got.device, torch.cuda.current_device()) == (OTHER, 0)
    torch.testing.assert_close(got.cpu(), CALLS[call](*arguments), rtol=1e-2, atol=1e-2)


def test_threads_train_on_a_device_each(devices):
    results = {}

    def work(device):
        torch.cuda.set_device(device)
        results[device] = loops[device].run().results()

    loops = {device: Loop(device) for device in devices}
    threads = [threading.Thread(target=work, args=(device,)) for device in devices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for device in devices:
        assert_alike(results[device], Loop("cpu").run().results())


def test_data_parallel_trains_as_one_model(devices):
    model = nn.Sequential(*network(CUDA))
    optimizer = AdamW(model.parameters(), lr=1e-2)
    reference = network("cpu")
    reference_optimizer = AdamW(reference.parameters(), lr=1e-2)
    parallel = nn.DataParallel(model, device_ids=devices)
    for step in range(3):
        parallel(batch(step, CUDA)).square().mean().backward()
        forward(reference, batch(step)).square().mean().backward()
        for it in (optimizer, reference_optimizer):
            it.step()
            it.zero_grad()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=2e-3, atol=2e-4)


def test_a_checkpoint_of_one_device_loads_on_another(devices):
    loop = Loop(CUDA).run(3)
    moved = Loop(OTHER)
    moved.layers.load_state_dict(loop.layers.state_dict())
    moved.optimizer.load_state_dict(loop.optimizer.state_dict())
    moved.scaler.load_state_dict(loop.scaler.state_dict())
    for it in (loop, moved):
        it.step(batch(7))
    assert all(map(torch.equal, moved.results()[1], loop.results()[1]))
