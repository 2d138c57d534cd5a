"""offload="stream": states that are read, saved, changed or given up between steps stay right."""

import gc
import io

import pytest
import torch
from torch import nn

from mpkernels.optim import AdamW
from tests.cuda.offloading import (
    F32,
    INT8,
    are_same,
    assert_same,
    buckets_of,
    loss_of,
    offloaded,
    take_step,
    trained,
    visible_state,
)
from tests.cuda.test_offload_stream import LARGE, pair
from tests.networks import B16

_buckets = buckets_of(64 * 64 * 10)  # the large parameters are cut


def test_a_read_of_the_states_waits_for_them_and_a_write_counts():
    params, ours, theirs, plain = pair(master="fp32")
    for step in range(3):
        for it, its_params in ((ours, params), (plain, theirs)):
            it.zero_grad()
            take_step(it, None, loss_of(its_params, step))
            it.state[its_params[0]]["exp_avg"].mul_(0.5)
    assert_same(ours, plain)


def test_copies_and_states_outlive_an_optimizer_that_ends_while_its_states_travel():
    params, ours, theirs, plain = pair()
    trained(ours, params), trained(plain, theirs)
    state = ours.state[params[0]]
    for it, its_params in ((ours, params), (plain, theirs)):
        it.zero_grad()
        take_step(it, None, loss_of(its_params, 9))
    wanted = plain.state[theirs[0]]["exp_avg"].cpu()
    del ours, it
    gc.collect()
    assert torch.equal(state["exp_avg"], wanted)


def test_what_is_saved_during_copies_is_whole_and_loads_in_each_way():
    params, ours, theirs, plain = pair(state_dtype=INT8)
    trained(ours, params), trained(plain, theirs)
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    assert len(file.getvalue()) < 12 * sum(it.numel() for it in params)  # each state once
    trained(plain, theirs)
    for way in (True, "stream", False):
        others = [nn.Parameter(it.detach().clone()) for it in params]
        other = AdamW(others, lr=0.01, offload=way, state_dtype=INT8)
        other.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
        trained(other, others)
        assert are_same(visible_state(other, norm=False)[:-2], visible_state(plain, norm=False)[:-2])


def gains_a_master(optimizer, params):
    for param in params:
        param.data = param.data.to(B16)


def turns_amsgrad_on(optimizer, params):
    optimizer.param_groups[0]["amsgrad"] = True


def loads_its_live_states(optimizer, params):
    saved = optimizer.state_dict()  # holds the states themselves
    take_step(optimizer, None, loss_of(params, 9))
    optimizer.load_state_dict(saved)


def gives_states_other_memory(optimizer, params):
    for state in optimizer.state.values():
        state["exp_avg"].data = state["exp_avg"].data * 0.5
        state["step"].data = state["step"].data.clone()


ACTS = (gains_a_master, turns_amsgrad_on, loads_its_live_states, gives_states_other_memory)


@pytest.mark.parametrize("act", ACTS, ids=lambda it: it.__name__)
def test_states_that_change_between_steps_are_followed(act):
    dtype = F32 if act is gains_a_master else B16
    (params, ours), (theirs, plain) = (offloaded(dtype, LARGE, way=way) for way in ("stream", False))
    for it, its_params in ((ours, params), (plain, theirs)):
        trained(it, its_params, bad_step=-1)
        it.zero_grad()
        act(it, its_params)
        it.zero_grad()
        trained(it, its_params, bad_step=-1)
    assert_same(ours, plain)


def test_a_master_that_follows_a_weight_writes_to_it_once():
    """A copy rounds ties to even, a split master up: a load writes to the weight. Later writes of the user count."""
    [param], optimizer = offloaded(B16, [(8,)], way="stream", master="fp32")
    param.grad = torch.ones_like(param)
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"][0]["master"] = torch.full((8,), 1 + 2.0**-8)
    param.detach().fill_(1 + 2.0**-7)
    optimizer.load_state_dict(saved)
    param.grad = None
    optimizer.step()
    param.detach().fill_(5)
    param.grad = torch.zeros_like(param)
    optimizer.param_groups[0].update(lr=0.0)
    optimizer.step()
    assert (param == 5).all()
