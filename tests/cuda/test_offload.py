"""offload computes the same bits as the optimizer without it, whichever copy is late."""

from contextlib import nullcontext

import pytest
import torch

from mpkernels.amp import accumulate
from tests.cuda.offloading import (
    F32,
    SCALERS,
    assert_same,
    buckets_of,
    for_each_kind,
    in_each_way,
    loss_of,
    parameters,
    trained,
)
from tests.networks import B16
from tests.optim.optimizers import OF_ANY_SHAPE, OPTIMIZERS

_buckets = buckets_of(800)  # more than there are slices


@pytest.mark.parametrize("scaler", SCALERS)
@for_each_kind
@pytest.mark.parametrize("line", OF_ANY_SHAPE.values(), ids=OF_ANY_SHAPE)
@pytest.mark.parametrize("limits", [{}, {"max_norm": 1.0}, {"guard": False}], ids=str)
@in_each_way
def test_offload_gives_the_same_bits(way, line, dtype, master, state_dtype, scaler, limits):
    if scaler == "torch's" and dtype != F32:
        pytest.skip("torch's scaler refuses such grads")
    options = {"master": master, "state_dtype": state_dtype, **limits}
    is_checked = scaler != "no scaler" or "max_norm" in limits or (dtype != F32 and not limits)
    bad_step = 2 if is_checked else -1
    ours, theirs = (
        trained(line.ours(params, offload=offload, **options), params, SCALERS[scaler](), bad_step)
        for offload, params in ((way, parameters(dtype)), (False, parameters(dtype)))
    )
    assert_same(ours, theirs)
    assert str(ours.overflow_report()) == str(theirs.overflow_report())
    assert ours.skipped_steps is None or ours.skipped_steps == (bad_step == 2)


@pytest.mark.parametrize("scaler", ["no scaler", "ours"])
@for_each_kind
@pytest.mark.parametrize("limits", [{}, {"max_norm": 1.0}, {"guard": False}], ids=str)
def test_released_grads_give_the_same_bits(dtype, master, state_dtype, scaler, limits):
    """The host computes the norm of released grads, where sums have another order."""
    options = {"master": master, "state_dtype": state_dtype, **limits}
    is_checked = scaler != "no scaler" or "max_norm" in limits or (dtype != F32 and not limits)
    bad_step, found = 2 if is_checked else -1, []
    for offload in (True, False):
        params, its_scaler = parameters(dtype), SCALERS[scaler]()
        optimizer = OPTIMIZERS["AdamW"].ours(params, offload=offload, **options)
        if offload:
            optimizer.release_grads(its_scaler)
        found.append(trained(optimizer, params, its_scaler, bad_step))
        assert not offload or all(param.grad is None for param in params)
    assert_same(*found, norm=False)
    if "max_norm" in limits:
        assert torch.allclose(found[0].grad_norm, found[1].grad_norm, rtol=2.0**-22, equal_nan=True)


def test_a_grad_that_is_set_by_hand_counts_though_grads_are_released():
    params, theirs = parameters(B16), parameters(B16)
    ours = OPTIMIZERS["AdamW"].ours(params, offload=True)
    ours.release_grads()
    optimizer = OPTIMIZERS["AdamW"].ours(theirs)
    for step in range(3):
        loss_of(theirs, step).backward()
        for param, other in zip(params, theirs, strict=True):
            param.grad = other.grad.clone()
        ours.step(), optimizer.step(), optimizer.zero_grad()
    assert_same(ours, optimizer, norm=False)


@for_each_kind
@pytest.mark.parametrize("way", ["accumulate", "backwards", "backwards under accumulate()"])
def test_released_grads_add_up_in_fp32(dtype, master, state_dtype, way):
    options = {"master": master, "state_dtype": state_dtype}
    params, theirs = parameters(dtype), parameters(dtype)
    wanted = OPTIMIZERS["AdamW"].ours(theirs, **options)
    for micro in accumulate(range(6), 3, wanted, grad_dtype=torch.float32):
        micro.backward(3 * loss_of(theirs, micro.batch))
    ours = OPTIMIZERS["AdamW"].ours(params, offload=True, **options)
    release = ours.release_grads()
    if way == "accumulate":
        for micro in accumulate(range(6), 3, ours, grad_dtype=torch.float32):
            micro.backward(3 * loss_of(params, micro.batch))
    else:
        for step in range(6):
            with release.accumulate() if step % 3 < 2 and "under" in way else nullcontext():
                (3 * loss_of(params, step) * (1 / 3)).backward()
            assert all(param.grad is None for param in params)
            if step % 3 == 2:
                ours.step()
    assert_same(ours, wanted, norm=False)


def test_released_grads_of_several_dtypes_add_up():
    params, theirs = parameters(B16), parameters(B16)
    ours, optimizer = OPTIMIZERS["AdamW"].ours(params, offload=True), OPTIMIZERS["AdamW"].ours(theirs)
    ours.release_grads()
    for step, dtype in enumerate((B16, F32, B16)):
        for param, other in zip(params, theirs, strict=True):
            param.grad_dtype, other.grad_dtype = dtype, F32
        loss_of(params, step).backward(), loss_of(theirs, step).backward()
    ours.step(), optimizer.step()
    assert_same(ours, optimizer, norm=False)


def test_zero_grad_forgets_the_grads_of_a_failed_backward():
    params, theirs = parameters(B16), parameters(B16)
    ours, optimizer = OPTIMIZERS["AdamW"].ours(params, offload=True), OPTIMIZERS["AdamW"].ours(theirs)
    ours.release_grads()
    loss_of(params, 7, without=(1, 3)).backward()
    ours.zero_grad()
    trained(ours, params), trained(optimizer, theirs)
    assert_same(ours, optimizer, norm=False)


def test_grads_that_a_release_has_sent_before_its_end_are_stepped_once():
    params, theirs = parameters(B16), parameters(B16)
    ours, optimizer = OPTIMIZERS["AdamW"].ours(params, offload=True), OPTIMIZERS["AdamW"].ours(theirs)
    release = ours.release_grads()
    loss_of(params, 7).backward(), loss_of(theirs, 7).backward()
    release.remove()
    ours.step(), optimizer.step()
    trained(ours, params), trained(optimizer, theirs)
    assert_same(ours, optimizer, norm=False)
