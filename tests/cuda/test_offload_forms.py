"""offload: closures, graphs, compiled steps, refusals, processes, and writes that raise no version."""

import pytest
import torch

from mpkernels.amp import GradScaler, accumulate
from mpkernels.optim import AdamW
from mpkernels.optim.offload.plan import OffloadedPlan
from tests.cuda.offloading import (
    SQUARE,
    are_same,
    assert_same,
    buckets_of,
    in_each_way,
    loss_of,
    offloaded,
    parameters,
    released_or_not,
    trained,
)
from tests.cuda.test_processes import fake_processes
from tests.cuda.training import CUDA
from tests.networks import B16

_buckets = buckets_of(64 * 64 * 2)  # one for each SQUARE


@in_each_way
def test_closures_and_steps_without_grads_work(way):
    params, optimizer = offloaded(way=way)
    theirs = parameters(B16, shapes=SQUARE)
    plain = AdamW(theirs, lr=0.01)
    optimizer.step()
    for step in range(3):
        for it, its_params in ((optimizer, params), (plain, theirs)):

            def closure(it=it, its_params=its_params, step=step):
                it.zero_grad()
                loss = loss_of(its_params, step)
                loss.backward()
                return loss

            assert it.step(closure) is not None
    assert_same(optimizer, plain)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@in_each_way
def test_a_capture_is_refused(way):
    params, optimizer = offloaded(way=way)
    trained(optimizer, params)
    graph = torch.cuda.CUDAGraph()
    says = rf"offload={way!r} can't be captured in a CUDA graph.*leave offload out"
    with pytest.raises(RuntimeError, match=says), torch.cuda.graph(graph):
        optimizer.step()


@in_each_way
def test_a_replayed_backward_is_stepped(way):
    """A graph's writes to grads raise no version, so grads are copied at each step."""
    params, optimizer = offloaded(guard=False, way=way)
    theirs = parameters(B16, shapes=SQUARE)
    plain = AdamW(theirs, lr=0.01, guard=False)
    factor = torch.ones((), device=CUDA, dtype=B16)
    for it, its_params in ((optimizer, params), (plain, theirs)):
        for param in its_params:
            param.grad = torch.zeros_like(param)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for param in its_params:
                param.grad.copy_(param * factor)
        for step in range(3):
            factor.fill_(step + 1)
            graph.replay()
            it.step()
    assert_same(optimizer, plain)


@in_each_way
def test_a_compiled_step_runs_as_written_or_is_refused(way):
    torch.compiler.reset()  # else code that was compiled for the other way might fit
    (params, optimizer), (theirs, plain) = offloaded(way=way), offloaded()
    for it, its_params in ((optimizer, params), (plain, theirs)):
        trained(it, its_params)
        it.zero_grad()
        loss_of(its_params, 9).backward()
    with pytest.raises(Exception, match=f"offload={way!r} must not be part of a full graph"):
        torch.compile(optimizer.step, backend="eager", fullgraph=True)()
    torch.compile(optimizer.step, backend="eager")(), plain.step()
    assert_same(optimizer, plain)


def test_what_offload_does_not_serve_is_refused():
    params, optimizer = offloaded(released=True)
    scaler = GradScaler("cuda", init_scale=4.0)
    scaler.scale(loss_of(params, 0)).backward()
    with pytest.raises(RuntimeError, match=r"that release_grads has sent to the host; leave unscale_ .* out"):
        scaler.unscale_(optimizer)
    optimizer.zero_grad()
    with pytest.raises(ValueError, match="max_norm must be given to AdamW"):
        accumulate([0], 1, optimizer, max_norm=1.0)
    theirs = torch.amp.GradScaler("cuda", init_scale=4.0)
    theirs.scale(loss_of(params, 0)).backward()
    with pytest.raises(RuntimeError, match=r"torch's GradScaler doesn't look for them; use mpkernels.amp.GradScaler"):
        theirs.step(optimizer)


def test_a_write_to_a_weight_that_raises_no_version_is_undone():
    """docs/differences.md says so. Writes that raise a tensor's version are noticed."""
    params, optimizer = offloaded(guard=False)
    trained(optimizer, params, bad_step=-1)
    optimizer.zero_grad()
    weight = params[0]
    for write, is_seen in ((lambda: weight.data.fill_(5), False), (lambda: weight.detach().fill_(5), True)):
        write()
        loss_of(params, 9).backward()
        optimizer.step()
        assert bool((weight.float() > 4).all()) is is_seen


@in_each_way
def test_a_skipped_step_sends_weights_that_another_kind_of_master_rounds_differently(way):
    """A copy rounds ties to even, a split master rounds them up."""
    [param], optimizer = offloaded(shapes=[(8,)], master="fp32", way=way)
    param.grad = torch.ones_like(param)
    optimizer.step()
    param.detach().fill_(1)
    optimizer.state[param]["master"].fill_(1 + 2.0**-8)
    optimizer.param_groups[0]["master"] = "split"
    param.grad.fill_(torch.inf)
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert (param == 1 + 2.0**-7).all()


def test_a_write_to_a_grad_that_raises_no_version_counts():
    params, optimizer = offloaded()
    theirs = parameters(B16, shapes=SQUARE)
    plain = AdamW(theirs, lr=0.01)
    for it, its_params in ((optimizer, params), (plain, theirs)):
        for step in range(2):
            it.zero_grad()
            loss_of(its_params, step).backward()
            for param in its_params:
                param.grad.data.clamp_(-0.1, 0.1)
            it.step()
    assert_same(optimizer, plain)


def test_memory_is_given_back():
    import gc
    import weakref

    params, optimizer = offloaded(released=True)
    trained(optimizer, params)
    plan, twin = optimizer._plans[0], optimizer._offload.twins.home(params[0])
    assert isinstance(plan, OffloadedPlan)
    optimizer._release.remove()
    dead = weakref.ref(optimizer), weakref.ref(plan), weakref.ref(twin)
    del optimizer, plan, twin
    gc.collect()
    assert [it() for it in dead] == [None] * 3


@pytest.mark.parametrize("by", ["process_group", "ZeRO"])
@released_or_not
def test_processes_agree_as_without_offload(by, way, released):
    from torch import distributed
    from torch.distributed.optim import ZeroRedundancyOptimizer

    found = []
    with fake_processes(1):
        for offload in (way, False):
            params = parameters(B16, shapes=SQUARE)
            options = {"lr": 0.01, "offload": offload, "max_norm": 1.0}
            if by == "ZeRO":
                optimizer = ZeroRedundancyOptimizer(params, AdamW, **options)
                inner = optimizer.optim
            else:
                inner = optimizer = AdamW(params, process_group=distributed.group.WORLD, **options)
            if offload and released:
                inner.release_grads()
            trained(optimizer, params)
            found.append([*map(torch.Tensor.cpu, params), inner.skipped_steps.cpu()])
            states = [it for state in inner.state.values() for it in state.values()]
            assert all(it.device.type == ("cpu" if offload else "cuda") for it in states)
    assert are_same(*found)
