"""torch.distributed's tools. Each of two processes sees half of each batch. Their result must be that of one process
with whole batches."""

import torch
from torch import distributed
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.matrix.copies import write_midway, written
from tests.matrix.runner import FIRST, PARTS, REST, Run, tool


@tool()
def ddp(run):
    run.model = DistributedDataParallel(run.model)
    run.steps()


@tool()
def ddp_with_views(run):
    run.model = DistributedDataParallel(run.model, gradient_as_bucket_view=True)
    run.steps()


def two_backwards(run):
    """Sum the grads of each half first, as each process does."""
    params = list(run.model.parameters())

    def backward(number):
        grads = []
        for part in PARTS:
            for micro_batch in (number, number + 100):
                run.scaler.scale(run.loss(micro_batch, part) / 2).backward()
            grads.append([param.grad for param in params])
            run.optimizer.zero_grad()
        for param, grads_of_parts in zip(params, zip(*grads, strict=True), strict=True):
            param.grad = sum(grads_of_parts)

    run.backward = backward
    run.steps()


@tool(like=two_backwards)
def ddp_no_sync(run):
    run.model, (part,) = DistributedDataParallel(run.model), run.parts

    def backward(number):
        with run.model.no_sync():
            run.scaler.scale(run.loss(number, part)).backward()
        run.scaler.scale(run.loss(number + 100, part)).backward()

    run.backward = backward
    run.steps()


@tool()
def ddp_midway(run):
    """DistributedDataParallel then gives all processes the first one's weights."""
    (part,), run.parts = run.parts, PARTS
    run.steps(FIRST)
    with torch.no_grad():
        for param in run.model.parameters():
            param.mul_(1 - part)
    run.model, run.parts = DistributedDataParallel(run.model), (part,)
    run.steps(REST)


@tool(like=write_midway)
def a_write_broadcast_by_hand(run):
    run.model, (part,) = DistributedDataParallel(run.model), run.parts
    run.steps(FIRST)
    if part == 0:
        written(run)
    for param in run.model.parameters():
        distributed.broadcast(param.detach(), 0)
    run.steps(REST)


@tool()
def ddp_with_gradient_release(run):
    run.model = DistributedDataParallel(run.model)
    run.optimizer.release_grads()
    run.steps()


@tool()
def ddp_checkpoint_on_one_rank(run):
    """Written by the first process, read by both, optimizer first."""
    (part,) = run.parts
    run.model = DistributedDataParallel(run.model)
    run.steps(FIRST)
    saved = [
        {name: getattr(run, name).state_dict() for name in ("optimizer", "scaler", "model")} if part == 0 else None
    ]
    distributed.broadcast_object_list(saved, 0)
    resumed = Run(run.drop_in, run.parts)
    resumed.model = DistributedDataParallel(run.drop_in.network(seed=7))
    resumed.optimizer = run.drop_in.optimizer(resumed.model.parameters())
    for name, state in saved[0].items():
        getattr(resumed, name).load_state_dict(state)
    resumed.steps(REST)
    return resumed.result()


def averaged_by_hand(run):
    """Two optimizers, each with half of the batch, whose weights become their mean after each second step."""
    halves = [Run(run.drop_in, (part,)) for part in PARTS]
    for number in range(5):
        for half in halves:
            half.steps([number])
        with torch.no_grad():
            for pair in () if number % 2 else zip(*(half.model.parameters() for half in halves), strict=True):
                mean = (pair[0] + pair[1]) / 2
                for param in pair:
                    param.copy_(mean)
    return weights(halves[0].model)


@tool(like=averaged_by_hand)
def post_local_sgd(run):
    run.optimizer = PostLocalSGDOptimizer(run.optimizer, PeriodicModelAverager(period=2))
    run.steps(range(5))
    return weights(run.model)


def weights(model):
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def plain_weights(run):
    run.steps()
    return weights(run.model) | run.scaler_result()


@tool(like=plain_weights)
def zero(run):
    run.model = DistributedDataParallel(run.model)
    run.optimizer = zero_optimizer(run)
    run.steps()
    return weights(run.model.module) | run.scaler_result()


def zero_optimizer(run, **more):
    return ZeroRedundancyOptimizer(run.model.parameters(), run.drop_in.kind, **run.drop_in.options | more)


@tool(like=plain_weights)
def zero_checkpoint(run):
    run.model = DistributedDataParallel(run.model)
    run.optimizer = zero_optimizer(run)
    run.steps(FIRST)
    run.optimizer.consolidate_state_dict(0)
    saved = [run.optimizer.state_dict() if run.parts == (0,) else None]
    distributed.broadcast_object_list(saved, 0)
    run.optimizer = zero_optimizer(run)
    run.optimizer.load_state_dict(saved[0])
    run.steps(REST)
    return weights(run.model.module) | run.scaler_result()


def clipped(run):
    run.optimizer = run.drop_in.optimizer(run.model.parameters(), max_norm=MAX_NORM)
    return plain_weights(run)


MAX_NORM = 4.0


@tool(like=clipped)
def zero_max_norm(run):
    run.model = DistributedDataParallel(run.model)
    run.optimizer = zero_optimizer(run, max_norm=MAX_NORM)
    run.steps()
    return weights(run.model.module) | run.scaler_result()
