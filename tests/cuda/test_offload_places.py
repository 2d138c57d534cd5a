"""offload: models that move, copies, parameters in several places and of any kind."""

import copy
import gc
import io
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from mpkernels.amp import GradScaler, to_full, to_mixed
from mpkernels.distributed.parts import part_of
from mpkernels.optim import AdamW
from tests.cuda.offloading import (
    F32,
    INT8,
    assert_same,
    buckets_of,
    in_each_way,
    loss_of,
    offloaded,
    parameters,
    released_or_not,
    take_step,
    trained,
)
from tests.cuda.test_processes import fake_processes
from tests.cuda.training import CUDA
from tests.hard_grads import same_bits
from tests.networks import B16

_buckets = buckets_of(64 * 64 * 2)  # one for each SQUARE


def move(params, place=None, dtype=None):
    for param in params:
        param.data = param.data.to(place or param.device, dtype or param.dtype)


@pytest.mark.parametrize("master", ["split", "fp32"])
@pytest.mark.parametrize(
    "to", [{"place": "cpu"}, {"place": torch.device("cuda", 1)}, {"dtype": F32}, {"dtype": torch.float16}], ids=str
)
@in_each_way
def test_training_goes_on_after_a_model_has_moved(way, to, master):
    """A model moves to the host and back, as when a sampler needs the GPU; or to another device or dtype for good."""
    if torch.cuda.device_count() < 2 and to.get("place") not in ("cpu", None):
        pytest.skip("there are no two CUDA devices")
    found = []
    for offload in (way, False):
        params = parameters(B16)
        optimizer = AdamW(params, lr=0.01, offload=offload, master=master)
        trained(optimizer, params)
        optimizer.zero_grad()
        if offload or "place" not in to:
            move(params, **to)
        if to.get("place") == "cpu":
            if offload:
                loss_of(params, 8).backward()
                optimizer.step()
                move(params, CUDA)
            else:
                optimizer.zero_grad()
                loss_of(params, 8).backward()
                optimizer.step()
        optimizer.zero_grad()
        trained(optimizer, params, bad_step=-1)
        found.append(optimizer)
    if to.get("place") != "cpu":
        assert_same(*found, norm=False)


def pickled(it):
    return pickle.loads(pickle.dumps(it))


def saved_and_loaded(it):
    file = io.BytesIO()
    torch.save(it, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled, saved_and_loaded], ids=lambda it: it.__name__)
@in_each_way
def test_a_copy_goes_on_alone(duplicate, way):
    params, optimizer = offloaded(way=way)
    trained(optimizer, params)
    optimizer.zero_grad()
    other = duplicate(optimizer)
    others = other.param_groups[0]["params"]
    assert (other.offload, repr(other)) == (way, repr(optimizer))
    for it, its_params in ((optimizer, params), (other, others)):
        trained(it, its_params, bad_step=1)
    assert_same(optimizer, other)


def test_a_model_that_leaves_the_device_takes_its_grads_along_and_no_pinned_memory():
    (params, optimizer), (theirs, plain) = offloaded(released=True), offloaded()
    for it, its_params in ((optimizer, params), (plain, theirs)):
        trained(it, its_params)
        it.zero_grad()
        loss_of(its_params, 8).backward()
    twin = weakref.ref(optimizer._offload.twins.home(params[0]))
    move(params, "cpu")
    for it in (optimizer, plain):
        it.step()
    assert_same(optimizer, plain, norm=False)
    gc.collect()
    assert twin() is None


@in_each_way
def test_a_loader_may_put_states_on_the_device(way):
    params, optimizer = offloaded(way=way)
    theirs, plain = offloaded()
    trained(optimizer, params), trained(plain, theirs)
    for state in optimizer.state.values():
        state.update({key: it.to(CUDA) for key, it in state.items()})
    optimizer.zero_grad(), plain.zero_grad()
    trained(optimizer, params), trained(plain, theirs)
    assert_same(optimizer, plain)


@pytest.mark.parametrize("places", [("cpu", CUDA), (CUDA, "cpu"), (CUDA, torch.device("cuda", 1))], ids=str)
@released_or_not
@pytest.mark.parametrize("scaled", [False, True])
def test_parameters_may_lie_in_several_places(devices, places, way, released, scaled):
    found = []
    for offload in (way, False):
        params = [it for place in places for it in parameters(B16, place)]
        optimizer = AdamW(params, lr=0.01, offload=offload, max_norm=1.0)
        scaler = GradScaler("cuda", init_scale=4.0) if scaled else None
        if offload and released:
            optimizer.release_grads()
        trained(optimizer, params, scaler)
        found.append(optimizer)
    assert_same(*found, norm=False)


@pytest.mark.parametrize("place", ["cpu", CUDA])
@in_each_way
def test_the_learning_rate_may_be_a_tensor(place, way):
    found = []
    for offload in (way, False):
        params = parameters(B16)
        optimizer = AdamW(params, lr=torch.tensor(0.01, device=place), betas=(0.8, 0.9), offload=offload)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(4):
            optimizer.zero_grad()
            take_step(optimizer, None, loss_of(params, step))
            schedule.step()
        found.append(optimizer)
    assert_same(*found)


@in_each_way
def test_weights_may_have_gaps_other_orders_and_complex_numbers(way):
    found = []
    for offload in (way, False):
        base = torch.linspace(-1, 1, 600, device=CUDA).to(B16)
        tensors = [base[:200].view(10, 20).t(), base[200:400:2], base[400:].view(20, 10)[:, ::3]]
        params = [nn.Parameter(it) for it in tensors]
        params.append(nn.Parameter(torch.linspace(-1, 1, 12, device=CUDA).to(torch.complex64)))
        optimizer = AdamW(params, lr=0.01, offload=offload, state_dtype=INT8)
        for step in range(3):
            for i, param in enumerate(params):
                grad = torch.full_like(param, 0.1 * (step + 1 + i))
                param.grad = grad.t().contiguous().t() if grad.ndim == 2 and step == 1 else grad
            optimizer.step()
        found.append(optimizer)
    assert_same(*found)


@released_or_not
def test_dtensors_of_fsdp2_train_as_without_offload(way, released):
    """A single process, whose parameters are DTensors on a mesh of GPUs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 128), nn.Linear(128, 4)).to(CUDA)  # of which one is cut
    twin, results = copy.deepcopy(model), []
    with fake_processes(1), warnings.catch_warnings(action="ignore"):
        for it, offload in ((model, way), (twin, False)):
            it = fully_shard(it.bfloat16())
            optimizer = AdamW(it.parameters(), lr=0.01, max_norm=1.0, offload=offload, state_dtype=INT8)
            if offload and released:
                optimizer.release_grads()
            for step in range(4):
                x = torch.randn(8, 24, generator=torch.Generator().manual_seed(step)).to(CUDA, B16)
                loss = it(x).float().square().mean() * (float("inf") if step == 2 else 1)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            saved = optimizer.state_dict()
            optimizer.load_state_dict(saved)
            with torch.no_grad():
                next(iter(it.parameters())).mul_(0.5)
            it(x).float().square().mean().backward()
            optimizer.step()
            states = [part_of(value) for state in optimizer.state.values() for value in state.values()]
            assert all(value.device.type == ("cpu" if offload else "cuda") for value in states)
            results.append([part_of(param.detach()).cpu() for param in it.parameters()] + [x.cpu() for x in states])
            results[-1].append(optimizer.skipped_steps.cpu())
    assert all(map(same_bits, *results))


@pytest.mark.parametrize("master", ["split", "fp32"])
@in_each_way
def test_to_full_takes_the_masters_from_the_host(way, master):
    found = []
    for offload in (way, False):
        torch.manual_seed(0)
        model = to_mixed(nn.Linear(64, 64, device=CUDA), B16)
        optimizer = AdamW(model.parameters(), lr=1e-3, master=master, offload=offload)
        model(torch.ones(2, 64, device=CUDA)).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(list(to_full(model, optimizer).parameters()))
    assert all(param.dtype == F32 for param in found[0])
    assert all(map(same_bits, *found))
