"""accumulate(grad_dtype=torch.float32) in two processes: the results under DDP, ZeRO, FSDP2, tensor parallelism."""

import math
from collections import OrderedDict
from functools import partial
from itertools import product

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from mpkernels.amp import GradScaler, accumulate
from mpkernels.distributed.parts import settled_grads
from mpkernels.optim import SGD, AdamW
from tests.distributed.sharding import even_network, mesh_of, network, shard, whole, wholes
from tests.hard_grads import same_bits
from tests.networks import B16, F16
from tests.processes import alone, in_processes, needs_gloo, run_checks, spawn

F32 = torch.float32
GROUPS, EVERY, WORLD = 2, 8, 2


def inputs_of(number, rank, columns):
    return torch.randn(8, columns, generator=torch.Generator().manual_seed(10 * number + rank))


def loss_of(model, inputs):
    return (model(inputs.to(next(model.parameters()).dtype)).float() - 1).square().mean()


def columns_of(model):
    return next(model.parameters()).shape[1]


def trained(model, wrapper, make, rank, scaler=None, is_bad=lambda number: False, grads_seen=None, **options):
    """Train and return the optimizer. The grads of each step are appended to ``grads_seen``."""
    optimizer = make(model.parameters())
    if grads_seen is not None:
        params = list(model.parameters())
        optimizer.register_step_pre_hook(lambda *_: grads_seen.append([whole(it.grad).clone() for it in params]))
    options = {"model": wrapper, "scaler": scaler, "grad_dtype": F32} | options
    for micro in accumulate(range(GROUPS * EVERY), EVERY, optimizer, **options):
        loss = loss_of(wrapper, inputs_of(micro.batch, rank, columns_of(model)))
        micro.backward(loss * math.inf if is_bad(micro.batch) else loss)
    return optimizer


def by_hand(model, make, mean_of, scaler=None, is_bad=lambda rank, number: False):
    """Train in one process. ``mean_of`` makes a step's fp32 grads from the 16-bit grads of each rank and batch."""
    optimizer = make(model.parameters())
    scaler = GradScaler("cpu", enabled=False) if scaler is None else scaler
    for first in range(0, GROUPS * EVERY, EVERY):
        grads = [
            [
                torch.autograd.grad(scaler.scale(loss_of(model, inputs) / EVERY * factor), list(model.parameters()))
                for number in range(first, first + EVERY)
                for inputs in [inputs_of(number, rank, columns_of(model))]
                for factor in [math.inf if is_bad(rank, number) else 1.0]
            ]
            for rank in range(WORLD)
        ]
        for i, param in enumerate(model.parameters()):
            param.grad_dtype = F32
            param.grad = mean_of([[it[i] for it in rank_grads] for rank_grads in grads])
        scaler.step(optimizer)
        scaler.update()
        for param in model.parameters():
            param.grad, param.grad_dtype = None, param.dtype
    return optimizer


def mean_of_sums(grads):
    """Do as DDP: each process adds up in fp32, then the sums are exchanged."""
    return sum(sum((it.float() for it in rank_grads[1:]), rank_grads[0].float()) / WORLD for rank_grads in grads)


def sum_of_means(grads):
    """Do as FSDP2: each batch's grads are exchanged in 16 bits, and each process adds up its part in fp32."""
    means = [(a / WORLD + b / WORLD).float() for a, b in zip(*grads, strict=True)]
    return sum(means[1:], means[0])


OURS = (
    (B16, lambda params: AdamW(params, lr=1e-2), False),
    (B16, lambda params: AdamW(params, lr=1e-2, max_norm=0.1), False),
    (F16, lambda params: AdamW(params, lr=1e-2, max_norm=0.1, state_dtype=torch.int8), True),
    (B16, lambda params: SGD(params, lr=1e-2, momentum=0.9, master="fp32"), True),
)


def scalers(is_scaled):
    return [GradScaler("cpu", init_scale=64.0, enabled=is_scaled) for _ in range(2)]


def ddp_takes_the_mean_of_fp32_sums(rank):
    for (dtype, make, is_scaled), options in product(OURS, ({}, {"gradient_as_bucket_view": True})):
        model, alone = network(dtype), network(dtype)
        mine, its = scalers(is_scaled)
        optimizer = trained(model, DistributedDataParallel(model, **options), make, rank, mine)
        theirs = by_hand(alone, make, mean_of_sums, its)
        assert all(map(same_bits, model.parameters(), alone.parameters()))
        assert optimizer.grad_norm is theirs.grad_norm or same_bits(optimizer.grad_norm, theirs.grad_norm)


def zero_steps_its_part(rank):
    """Under ZeRO, each process steps some of the parameters, clipped by the norm of all."""
    model, alone = network(B16), network(B16)
    options = {"lr": 1e-2, "max_norm": 0.1}
    make = partial(ZeroRedundancyOptimizer, optimizer_class=AdamW, **options)
    trained(model, DistributedDataParallel(model), make, rank)
    by_hand(alone, partial(AdamW, **options), mean_of_sums)
    assert all(map(same_bits, model.parameters(), alone.parameters()))


def an_overflow_of_one_process_costs_all_the_group(rank):
    for wraps, mean_of in ((DistributedDataParallel, mean_of_sums), (partial(shard, kind="fsdp2"), sum_of_means)):
        model, alone = even_network(F16), even_network(F16)
        mine, its = scalers(True)
        wrapper = wraps(model)
        optimizer = trained(model, wrapper, OURS[2][1], rank, mine, lambda number: rank == 1 and number == 3)
        theirs = by_hand(alone, OURS[2][1], mean_of, its, lambda rank, number: rank == 1 and number == 3)
        assert mine.get_scale() == its.get_scale() == 32.0
        assert optimizer.skipped_steps == theirs.skipped_steps == 1
        assert all(map(same_bits, wholes(model), wholes(alone)))


def fsdp2_adds_up_means_in_fp32(rank):
    for dtype, make, is_scaled in OURS:
        model, alone = even_network(dtype), even_network(dtype)
        shard(model, "fsdp2")
        mine, its = scalers(is_scaled)
        optimizer = trained(model, model, make, rank, mine)
        theirs = by_hand(alone, make, sum_of_means, its)
        assert all(map(same_bits, wholes(model), wholes(alone)))
        assert optimizer.grad_norm is theirs.grad_norm or same_bits(optimizer.grad_norm, theirs.grad_norm)
        assert all(param.grad_dtype == dtype for param in model.parameters())


def fsdp2_adds_up_in_fp32_with_each_policy(rank):
    """With each policy grads add up in fp32. FSDP2's own sums for one exchange a group would be in 16 bits."""
    make = lambda params: SGD(params, lr=0.0)  # noqa: E731
    for dtype, policies in (
        (B16, {}),
        (B16, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
        (B16, {"mp_policy": MixedPrecisionPolicy(reduce_dtype=F32)}),
        (F32, {"mp_policy": MixedPrecisionPolicy(param_dtype=B16)}),
    ):
        errors, exact = [], network(B16).double()
        for number, each_rank in product(range(EVERY), range(WORLD)):
            (loss_of(exact, inputs_of(number, each_rank, 20)) / EVERY / WORLD).backward()
        for width in (F32, None):
            model, grads_seen = network(B16).to(dtype), []
            trained(shard(model, "fsdp2", **policies), model, make, rank, grads_seen=grads_seen, grad_dtype=width)
            assert all(it.dtype == (F32 if width or dtype == F32 else B16) for it in grads_seen[0])
            pairs = zip(grads_seen[0], exact.parameters(), strict=True)
            errors.append(sum((grad.double() - param.grad).square().sum() for grad, param in pairs))
        assert errors[0] < errors[1], policies


def parallel_layers_add_up_in_fp32(rank):
    """Each process holds a summand of some grads, such as a norm's."""
    torch.manual_seed(0)
    layers = {"norm": nn.LayerNorm(20), "up": nn.Linear(20, 32), "down": nn.Linear(32, 20)}
    model = nn.Sequential(OrderedDict(layers)).to(B16)
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(model, mesh_of("fsdp2"), plan)

    def loss(number):
        inputs = torch.randn(2, 4, 20, generator=torch.Generator().manual_seed(number)).to(B16)
        return model(inputs[:, 2 * rank : 2 * rank + 2]).float().square().sum()

    totals, sizes = ([torch.zeros(it.shape) for it in model.parameters()] for _ in range(2))
    for number in range(EVERY):
        (loss(number) / EVERY).backward()
        for total, size, grad in zip(totals, sizes, settled_grads(list(model.parameters())), strict=True):
            total += whole(grad)
            size += whole(grad).abs()
        model.zero_grad()
    optimizer, grads_seen = AdamW(model.parameters(), max_norm=0.1), []
    optimizer.register_step_pre_hook(lambda *_: grads_seen.extend(map(whole, settled_grads(list(model.parameters())))))
    for micro in accumulate(range(EVERY), EVERY, optimizer, model=model, grad_dtype=F32):
        micro.backward(loss(micro.batch))
    for grad, total, size in zip(grads_seen, totals, sizes, strict=True):
        assert grad.dtype == F32
        assert ((grad - total).abs() <= (2.0**-8 + 2.0**-20) * size).all()  # two processes' summands added in 16 bits


CHECKS = (
    *(ddp_takes_the_mean_of_fp32_sums, an_overflow_of_one_process_costs_all_the_group),
    *(zero_steps_its_part, fsdp2_adds_up_means_in_fp32),
    *(fsdp2_adds_up_in_fp32_with_each_policy, parallel_layers_add_up_in_fp32),
)


@in_processes
def test_two_processes(tmp_path):
    spawn(partial(run_checks, CHECKS), tmp_path, WORLD)


@needs_gloo
def test_fsdp2_adds_up_each_batchs_grads_in_fp32():
    """Were a group exchanged once, as without grad_dtype, FSDP2 would add its grads up in 16 bits."""
    plain, grads_seen = even_network(B16), []
    losses = [loss_of(plain, inputs_of(number, 0, 64)) / EVERY for number in range(EVERY)]
    grads = zip(*(torch.autograd.grad(it, list(plain.parameters())) for it in losses), strict=True)
    with alone():
        model = fully_shard(even_network(B16))
        trained(model, model, lambda params: SGD(params, lr=0.0), 0, grads_seen=grads_seen)
    for found, (first, *others) in zip(grads_seen[0], grads, strict=True):
        assert same_bits(found, sum((it.float() for it in others), first.float()))
