"""offload=True with late streams: what may be read or written meanwhile."""

import pytest
import torch

from tests.cuda.offloading import F32, assert_same, buckets_of, loss_of, parameters, take_step, trained
from tests.cuda.training import CUDA, on_side
from tests.hard_grads import same_bits
from tests.networks import B16
from tests.optim.optimizers import OPTIMIZERS

_buckets = buckets_of(800)  # more than there are slices


def late_clone(params):
    return [param.detach().clone() for param in params]


def values(tensors):
    return [it.cpu() for it in tensors]


def test_a_late_read_of_the_old_weights_gets_them():
    """A copy to a weight must wait for reads on the step's stream. The grads left long ago: no other wait delays it."""
    params = parameters(F32)
    optimizer = OPTIMIZERS["AdamW"].ours(params, offload=True)
    optimizer.release_grads()
    trained(optimizer, params, bad_step=-1)
    wanted = values(params)
    loss_of(params, 9).backward()
    read = late_clone(params)
    optimizer.step()
    for lane in optimizer._offload.twins._lanes.values():
        lane.wait()
    assert all(map(same_bits, values(read), wanted))
    assert not torch.equal(params[0].detach().cpu(), wanted[0])


def test_a_step_on_another_stream_does_not_change_what_the_first_one_copies():
    """The second step writes to the twins, from which the first step's weights are still copied."""
    params = parameters(F32, shapes=[(8, 8)])
    optimizer = OPTIMIZERS["SGD"].ours(params, offload=True)
    optimizer.release_grads()
    loss_of(params, 0).backward()
    optimizer.step()
    first = late_clone(params)
    read = torch.cuda.current_stream().record_event()
    with torch.cuda.stream(torch.cuda.Stream(CUDA)):
        params[0].grad = torch.ones(8, 8).to(CUDA)
        optimizer._offload.arrived.take(params[0])  # a backward that reads no new weight does so without a wait
        torch.cuda.current_stream().wait_event(read)
        optimizer.step()
    theirs = parameters(F32, shapes=[(8, 8)])
    plain = OPTIMIZERS["SGD"].ours(theirs)
    loss_of(theirs, 0).backward()
    plain.step()
    assert same_bits(first[0].cpu(), theirs[0].detach().cpu())


def test_a_freed_grad_is_not_written_over_before_it_has_left():
    params, theirs = parameters(F32, shapes=[(64, 64)]), parameters(F32, shapes=[(64, 64)])
    ours, plain = OPTIMIZERS["SGD"].ours(params, offload=True), OPTIMIZERS["SGD"].ours(theirs)
    ours.release_grads()
    for optimizer, its_params in ((ours, params), (plain, theirs)):
        loss_of(its_params, 3).backward()
        if optimizer is ours:
            others = [torch.full((64, 64), 7.0, device=CUDA) for _ in range(8)]
            torch.cuda.current_stream().synchronize()
            del others
        optimizer.step()
    assert_same(ours, plain, norm=False)


@pytest.mark.parametrize("released", [False, True])
def test_streams_may_take_turns(released):
    params, theirs = parameters(B16), parameters(B16)
    ours = OPTIMIZERS["AdamW"].ours(params, offload=True)
    if released:
        ours.release_grads()
    for step in range(6):
        with torch.cuda.stream(on_side()):
            take_step(ours, None, loss_of(params, step))
            ours.zero_grad()
            done = torch.cuda.current_stream().record_event()
        torch.cuda.current_stream().wait_event(done)
    plain = trained(OPTIMIZERS["AdamW"].ours(theirs), theirs, bad_step=-1, steps=6)
    assert_same(ours, plain, norm=False)
