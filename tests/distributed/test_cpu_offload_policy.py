"""FSDP2's CPUOffloadPolicy in two processes: they step, clip, skip and save as one process does, bit for bit."""

import math
from functools import partial
from unittest import mock

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from mpkernels.amp import GradScaler, accumulate
from mpkernels.optim import AdamW, Masters
from tests.distributed.sharding import backward, even_network, network, part_of, shard, trained, whole, wholes
from tests.hard_grads import same_bits
from tests.networks import B16, F16
from tests.optim.optimizers import OPTIMIZERS
from tests.processes import in_processes, run_checks, spawn

F32, INT8 = torch.float32, torch.int8
OFFLOADED = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}  # a CPU has no memory to pin


def scaler():
    return GradScaler("cpu", init_scale=1024.0)


def whole_states(optimizer):
    """Return all states of the optimizer as whole tensors, by parameter and key."""
    states = optimizer.state_dict()["state"]
    return {(i, key): whole(it) for i, state in states.items() for key, it in state.items() if torch.is_tensor(it)}


def assert_as_one_process(dtype, make, rank, is_scaled=False, clips=False):
    alone, model = even_network(dtype), shard(even_network(dtype), "fsdp2", **OFFLOADED)
    (theirs, their_outcomes), (optimizer, outcomes) = (
        trained(it, make, scaler() if is_scaled else None, clips, spoils=it is alone or rank == 1)
        for it in (alone, model)
    )
    assert all(map(same_bits, wholes(model), wholes(alone)))
    assert all(a is b or same_bits(a, b) for a, b in zip(outcomes, their_outcomes, strict=True))
    saved, wanted = whole_states(optimizer), whole_states(theirs)
    assert saved.keys() == wanted.keys()
    assert all(same_bits(it, wanted[key]) for key, it in saved.items())
    if is_scaled or dtype != F32:
        assert optimizer.skipped_steps == 1


KINDS = (F32, "split", F32), (B16, "split", F32), (B16, "fp32", B16), (B16, "split", INT8)


def adamw_clips_and_skips_as_one_process(rank):
    for dtype, master, state_dtype in KINDS:
        make = partial(OPTIMIZERS["AdamW"].ours, master=master, state_dtype=state_dtype)
        assert_as_one_process(dtype, partial(make, max_norm=0.1), rank)
        assert_as_one_process(dtype, partial(make, max_norm=0.1), rank, is_scaled=True)
        assert_as_one_process(dtype, make, rank, is_scaled=True)
        assert_as_one_process(dtype, make, rank, is_scaled=True, clips=True)


def other_optimizers_step_as_one_process(rank):
    for line in OPTIMIZERS.values():
        assert_as_one_process(B16, partial(line.ours, max_norm=0.1, state_dtype=INT8), rank, is_scaled=True)
    for dtype in (F32, B16):
        around_sgd = lambda params: Masters(torch.optim.SGD(params, lr=0.1), max_norm=0.1)  # noqa: E731
        assert_as_one_process(dtype, around_sgd, rank, is_scaled=True)


def training_is_as_without_the_offload(rank):
    """It gives the same bits for parts that don't fill blocks, for grads in other dtypes than the weights, and in fp16,
    where FSDP2 halves grads and adds them up."""
    policy = MixedPrecisionPolicy(param_dtype=B16, reduce_dtype=F32)
    make = partial(OPTIMIZERS["AdamW"].ours, max_norm=0.1, state_dtype=INT8)
    for dtype, policies in ((F32, {"mp_policy": policy}), (F16, {})):
        found = []
        for offload in ({}, OFFLOADED):
            model = shard(network(dtype), "fsdp2", **policies, **offload)
            found.append((trained(model, make, scaler(), spoils=rank == 1)[1], wholes(model)))
        (outcomes, weights), (their_outcomes, theirs) = found
        assert all(map(same_bits, weights, theirs))
        assert all(a is b or same_bits(a, b) for a, b in zip(outcomes, their_outcomes, strict=True))


def checkpoints_go_both_ways(rank):
    make = partial(OPTIMIZERS["AdamW"].ours, max_norm=0.1, state_dtype=INT8)
    found = []
    for offload in ({}, OFFLOADED):
        model = shard(even_network(B16), "fsdp2", **offload)
        found.append((model, trained(model, make)[0]))
    states, theirs = (get_optimizer_state_dict(*it)["state"] for it in found)
    for name, state in states.items():
        assert all(same_bits(part_of(it), part_of(theirs[name][key])) for key, it in state.items())
    ends = []
    for (model, optimizer), offload in zip(found, (OFFLOADED, {}), strict=True):
        other = shard(even_network(B16), "fsdp2", **offload)
        other.load_state_dict(model.state_dict())
        loaded = make(other.parameters())
        loaded.load_state_dict(optimizer.state_dict())
        for it, its in ((model, optimizer), (other, loaded)):
            its.zero_grad()
            backward(it, 9)
            its.step()
            ends.append(wholes(it))
    assert all(same_bits(a, b) for weights in ends for a, b in zip(weights, ends[0], strict=True))


class Device:
    """An accelerator whose copies to the host arrive only when somebody waits."""

    def __init__(self, model):
        self.late = {}
        self.model = model

    def delay(self):
        """Hide new grads, as if their copies were still on the way, in a hook that runs before ours."""
        for param in self.model.parameters():
            param.register_post_accumulate_grad_hook(self._send)

    def _send(self, param):
        grad = part_of(param.grad)
        self.late[grad] = grad.clone()
        grad.fill_(math.nan)

    def synchronize(self):
        for grad, sent in self.late.items():
            grad.copy_(sent)
        self.late.clear()


def hooks_wait_for_late_grads(rank):
    """In torch 2.10, hooks come while the device still copies. An accelerator's stream is made up."""
    for uses in ("release_grads", "release_grads of all", "accumulate"):
        results = []
        for is_late in (True, False):
            model = shard(even_network(B16), "fsdp2", **OFFLOADED)
            device = Device(model)
            if is_late:
                device.delay()
            optimizer = AdamW(model.parameters(), guard=uses != "release_grads")
            with (
                mock.patch.object(torch.accelerator, "is_available", return_value=is_late),
                mock.patch.object(torch.accelerator, "current_stream", return_value=device),
            ):
                if uses == "accumulate":
                    for micro in accumulate([0], 1, optimizer, model=model, grad_dtype=F32):
                        micro.backward(model(torch.ones(2, 64, dtype=B16)).float().square().mean())
                else:
                    optimizer.release_grads()
                    backward(model, 0)
                    optimizer.step()
            results.append(wholes(model))
        assert all(map(same_bits, *results)), uses


CHECKS = (
    *(hooks_wait_for_late_grads, adamw_clips_and_skips_as_one_process),
    *(other_optimizers_step_as_one_process, training_is_as_without_the_offload),
    checkpoints_go_both_ways,
)


@in_processes
def test_two_processes(tmp_path):
    spawn(partial(run_checks, CHECKS), tmp_path)
