"""release_grads refuses grads that DistributedDataParallel sums up: before the sum, processes have different ones."""

import copy

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from mpkernels.optim import AdamW
from tests.hard_grads import same_bits
from tests.networks import backward, network
from tests.processes import alone, in_processes, needs_gloo, spawn

REFUSED = (
    r"^AdamW.release_grads: params\[0\] of shape \(30, 20\) must not be DistributedDataParallel's, .* leave it out, or "
    r"end it by the remove\(\) of what release_grads returned$"
)


class Derived(DistributedDataParallel):
    pass


def wrapped_and_released(kind, when, model, options, adamw_options):
    optimizer = AdamW(model.parameters(), **adamw_options)
    if when == "before":
        wrapped = kind(model, **options)
    release = optimizer.release_grads()
    if when == "after a step":
        backward(model, 0)
        optimizer.step()
    return release, wrapped if when == "before" else kind(model, **options)


def first_backward_is_refused(rank):
    for kind, options in (
        (DistributedDataParallel, {}),
        (DistributedDataParallel, {"static_graph": True}),
        (DistributedDataParallel, {"gradient_as_bucket_view": True}),
        (Derived, {"find_unused_parameters": True}),
    ):
        for adamw_options in ({}, {"max_norm": 1.0}):
            for when in ("before", "after", "after a step"):
                model = network()
                release, wrapped = wrapped_and_released(kind, when, model, options, adamw_options)
                weights = copy.deepcopy(list(model.parameters()))
                for _ in range(2):
                    with pytest.raises(RuntimeError, match=REFUSED):
                        wrapped(torch.full((2, 20), 1.0 + rank)).sum().backward()
                with release.accumulate(), wrapped.no_sync(), pytest.raises(RuntimeError, match=REFUSED):
                    wrapped(torch.ones(2, 20)).sum().backward()
                assert all(map(same_bits, weights, model.parameters()))


@in_processes
def test_the_first_backward_under_ddp_is_refused(tmp_path):
    spawn(first_backward_is_refused, tmp_path)


@needs_gloo
def test_only_parameters_whose_grads_ddp_sums_up_are_refused():
    with alone():
        ignored, model, other = network(), network(), network()
        names = [name for name, _ in ignored.named_parameters()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignored, names[1:])
        wrapped = DistributedDataParallel(ignored), DistributedDataParallel(model)
        for params in (other.parameters(), list(ignored.parameters())[1:]):
            AdamW(params).release_grads()
        backward(other, 0)
        backward(ignored, 0)
        assert all(param.grad is None for param in (*other.parameters(), *list(ignored.parameters())[1:]))
        release = AdamW(model.parameters()).release_grads()
        with pytest.raises(RuntimeError, match=REFUSED):
            backward(model, 0)
        release.remove()
        del wrapped
        backward(model, 0)
        assert all(param.grad is not None for param in model.parameters())
