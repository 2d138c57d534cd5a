"""accumulate(grad_dtype=torch.float32) under DistributedDataParallel: how it exchanges grads, and what is refused."""

from functools import partial
from unittest import mock

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from benchmarks.many_gpus import among
from mpkernels.amp import accumulate
from mpkernels.distributed import ddp
from mpkernels.optim import SGD, AdamW
from tests.amp.test_amp_steps import Watch
from tests.distributed.sharding import network
from tests.distributed.test_accumulate_in_fp32 import EVERY, F32, WORLD, inputs_of, loss_of
from tests.hard_grads import same_bits
from tests.networks import B16
from tests.processes import alone, in_processes, needs_gloo, run_checks, spawn


def grads_are_exchanged_once_a_group(rank):
    """The host doesn't wait, unless some parameters may be unused."""
    model = network(B16)
    wrapper, optimizer = DistributedDataParallel(model), AdamW(model.parameters())
    for micro in accumulate(range(EVERY), EVERY, optimizer, model=wrapper, grad_dtype=F32):
        loss = loss_of(wrapper, inputs_of(micro.batch, rank, 20))
        with Watch() as watch:
            micro.backward(loss)
        assert sum("c10d" in it for it in watch.seen) == (1 if micro.is_last else 0)


class Branches(nn.Module):
    """Each of two processes uses one of the three branches. Nobody uses the third."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(20, 5, dtype=B16) for _ in range(3))
        self.frozen = nn.Linear(20, 5, dtype=B16).requires_grad_(False)

    def forward(self, x):
        return self.branches[distributed.get_rank()](x) + self.frozen(x)


def unused_parameters_are_found_or_refused(rank):
    results = []
    for width in (F32, None):
        model = Branches()
        trained_params = [it for it in model.parameters() if it.requires_grad]
        wrapper = DistributedDataParallel(model, find_unused_parameters=True)
        optimizer = AdamW(trained_params, lr=1e-2)
        for micro in accumulate(range(2), 1, optimizer, model=wrapper, grad_dtype=width):
            micro.backward(wrapper(inputs_of(micro.batch, rank, 20).to(B16)).float().square().mean())
        assert len(optimizer.state) == 4  # the third branch's parameters have none
        results.append([it.detach() for it in model.parameters()])
    assert all(map(same_bits, *results))  # one batch a group is a plain step
    model = Branches()
    wrapper = DistributedDataParallel(model)
    micro = next(accumulate([0], 1, AdamW(model.parameters()), model=wrapper, grad_dtype=F32))
    with pytest.raises(RuntimeError, match=r"accumulate: a parameter of shape .* give .* find_unused_parameters=True"):
        micro.backward(wrapper(inputs_of(0, rank, 20).to(B16)).sum())


class Picture(nn.Module):
    """A network with a channels-last weight and grad, and with a norm that has buffers and fp32 parameters."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3).to(B16, memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x):
        return self.norm(self.conv(x.to(B16).contiguous(memory_format=torch.channels_last)).float())


def buffers_strides_and_other_steps_stay_right(rank):
    """The next forward broadcasts buffers, as after DDP's own exchange. DDP's own exchange still works in between."""
    model = Picture()
    wrapper, optimizer = DistributedDataParallel(model), AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(2):
        wrapper(torch.randn(2, 3, 8, 8, generator=generator)).relu().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        images = [torch.randn(2, 3, 8, 8, generator=generator) for _ in range(2)]
        for micro in accumulate(images, 2, optimizer, model=wrapper, grad_dtype=F32):
            micro.backward(wrapper(micro.batch)[..., 0].square().mean())
    assert len(set(gathered(model.norm.running_mean.sum()))) == WORLD
    with torch.no_grad():
        wrapper(torch.zeros(2, 3, 8, 8))
    assert all(len(set(gathered(it.double().sum()))) == 1 for it in model.state_dict().values())


def gathered(number):
    found = [None] * WORLD
    distributed.all_gather_object(found, number.item())
    return found


def fp32_parameters_are_exchanged_by_ddp(rank):
    model = network()
    wrapper, optimizer = DistributedDataParallel(model), AdamW(model.parameters())
    for micro in accumulate(range(2), 2, optimizer, model=wrapper, grad_dtype=F32):
        assert wrapper.require_backward_grad_sync == micro.is_last
        micro.backward(loss_of(wrapper, inputs_of(micro.batch, rank, 20)))


def buckets_of_any_size_give_the_same(rank):
    """Grads of two dtypes take turns; one is larger than a bucket."""
    results = []
    for size in (2**30, 2000):
        model = network(B16)
        model[2].float()
        wrapper, optimizer = DistributedDataParallel(model), SGD(model.parameters(), lr=0.1)
        with mock.patch.object(ddp, "_BUCKET_BYTES", size):
            for micro in accumulate(range(2), 2, optimizer, model=wrapper, grad_dtype=F32):
                sums = [it.float().square().sum() * (rank + micro.batch) for it in wrapper.parameters()]
                micro.backward(sum(sums))
        results.append(list(model.parameters()))
    assert all(map(same_bits, *results))


CHECKS = (
    *(grads_are_exchanged_once_a_group, buckets_of_any_size_give_the_same),
    *(unused_parameters_are_found_or_refused, buffers_strides_and_other_steps_stay_right),
    fp32_parameters_are_exchanged_by_ddp,
)


@in_processes
def test_two_processes(tmp_path):
    spawn(partial(run_checks, CHECKS), tmp_path, WORLD)


@needs_gloo
def test_wrappers_that_are_not_served_are_refused():
    with alone():
        model = network(B16)
        wrapper, optimizer = DistributedDataParallel(model), AdamW(model.parameters())
        with pytest.raises(
            RuntimeError, match=r"accumulate: params\[0\] .* pass the wrapper as model, or leave grad_dtype"
        ):
            accumulate([0], 1, optimizer, grad_dtype=F32)
        inside = nn.ModuleDict({"wrapper": wrapper})
        accumulate([0], 1, optimizer, model=inside, grad_dtype=F32)
        wrapper.register_comm_hook(None, lambda _, bucket: torch.futures.Future())
        with pytest.raises(ValueError, match=r"grad_dtype must be left out .* a communication hook"):
            accumulate([0], 1, optimizer, model=wrapper, grad_dtype=F32)
        model = network(B16)
        wrapper = DistributedDataParallel(model, static_graph=True)
        with pytest.raises(ValueError, match=r"grad_dtype must be left out .* static_graph=True"):
            accumulate([0], 1, AdamW(model.parameters()), model=wrapper, grad_dtype=F32)
        with pytest.warns(UserWarning, match="NO_SHARD"):  # one process shards nothing
            flat = FullyShardedDataParallel(network(B16), device_id=torch.device("cpu"))
        with pytest.raises(
            ValueError, match=r"grad_dtype must be left out under FullyShardedDataParallel, .* fully_shard"
        ):
            accumulate([0], 1, AdamW(flat.parameters()), model=flat, grad_dtype=F32)


def test_a_wrapper_of_some_processes_exchanges_grads_among_these():
    def all_reduce(tensor, op=None, group=None):
        """Do as if the other processes had zeros."""
        groups.append(group)

    def stepped():
        model, some = nn.Linear(3, 2, bias=False, dtype=B16), distributed.new_group([0, 1])
        nn.init.zeros_(model.weight)
        wrapper = DistributedDataParallel(model, process_group=some, find_unused_parameters=True)
        optimizer = SGD(model.parameters(), lr=1.0)
        for micro in accumulate([torch.ones(1, 3, dtype=B16)], 1, optimizer, model=wrapper, grad_dtype=F32):
            micro.backward(wrapper(micro.batch).sum())
        assert groups == [some] * 2
        return model.weight

    groups = []
    with mock.patch.object(distributed, "all_reduce", all_reduce):
        assert (among(4, stepped) == -1 / 2).all()
