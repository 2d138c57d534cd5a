"""FSDP2 and HSDP: four processes train as one does, bit for bit. Only last bits differ if a norm clips and parts cut
packs of grad_stats."""

import gc
from functools import partial
from itertools import product

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from mpkernels.amp import GradScaler, accumulate
from mpkernels.optim import AdamW
from tests.distributed.sharding import (
    STEPS,
    WORLD,
    backward,
    even_network,
    network,
    shard,
    trained,
    whole,
    wholes,
)
from tests.hard_grads import same_bits
from tests.networks import B16, F16
from tests.processes import in_processes, run_checks, spawn

F32, INT8 = torch.float32, torch.int8
KINDS = "fsdp2", "hsdp"


def ours(**options):
    return lambda params: AdamW(params, lr=1e-2, **options)


def torchs_fused(params):
    """torch's fused step rounds differently in vectors and in the scalars at the end of a part."""
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


def are_close(a, b):
    """Return whether only roundings differ: a handful a step, each by an ulp of the weight or of its update."""
    return (a - b).abs().max() <= STEPS * 2**-23 * (2 * b.abs().max() + 8 * 1e-2)


CASES = (  # dtype, optimizer, whether by a scaler, what clips: clip_grad_norm_ in the loop, or the step
    (F32, ours(), True, None),
    (F32, ours(), True, "loop"),
    (F32, ours(max_norm=0.1, amsgrad=True), False, "step"),
    (F32, ours(max_norm=0.1), True, "step"),
    (B16, ours(), False, None),
    (F16, ours(), True, "loop"),
    (B16, ours(master="fp32", max_norm=0.1), False, "step"),
    (B16, ours(state_dtype=B16), True, None),
    (F32, torchs_fused, True, None),
    (F32, torchs_fused, True, "loop"),
    (F32, lambda params: torch.optim.SGD(params, lr=0.1), True, None),
)


def are_same_outcomes(a, b):
    """Return whether at most a norm's last bits differ. If parts begin within a pack of grad_stats, fp32 adds other
    squares, and each of the two norms may be off by 2^-23, half of a pack's four roundings. Scales and counts are whole
    numbers, which this holds to the last bit."""
    return a is b or same_bits(a, b) or (a.dtype == F32 and abs(a - b) <= 2.0**-22 * b)


def four_processes_train_as_one(rank):
    for kind, new, case in product(KINDS, (network, even_network), CASES):
        dtype, make, is_scaled, clips = case
        alone, model = new(dtype), shard(new(dtype), kind)
        scalers = (GradScaler("cpu", init_scale=64.0) if is_scaled else None for _ in range(2))
        _, want = trained(alone, make, next(scalers), clips == "loop")
        _, outcomes = trained(model, make, next(scalers), clips == "loop", spoils=rank == 0)
        has_whole_packs = new is even_network
        for a, b in zip(outcomes, want, strict=True):
            assert (a is b or same_bits(a, b)) if has_whole_packs else are_same_outcomes(a, b), (kind, case, a, b)
        # A norm with other last bits clips weights to other last bits. Nothing else may be rounded differently.
        may_round = make is torchs_fused or not (has_whole_packs or clips is None)
        for a, b in zip(wholes(model), wholes(alone), strict=True):
            assert same_bits(a, b) or (may_round and are_close(a, b)), (kind, new, case)


def moments_in_8_bits_are_near(rank):
    """If each part is a multiple of 256, blocks are those of the whole. Else each error is within the bound of
    csrc/step/int8.h for the largest magnitude."""
    for kind in KINDS:
        alone, model = even_network(B16), shard(even_network(B16), kind)
        for it, spoils in ((alone, True), (model, rank == 0)):
            trained(it, ours(state_dtype=INT8, max_norm=0.1), spoils=spoils)
        assert all(map(same_bits, wholes(model), wholes(alone)))
    wide, model = network(), shard(network(), "fsdp2")
    optimizers = AdamW(wide.parameters()), AdamW(model.parameters(), state_dtype=INT8)
    for it, optimizer in zip((wide, model), optimizers, strict=True):
        backward(it, 0)
        optimizer.step()
    exact, coded = (it.state_dict()["state"] for it in optimizers)
    for i in exact:
        for key, root, steps in (("exp_avg", 1, 127), ("exp_avg_sq", 0.5, 255)):
            want, got = (whole(it[i][key]).double() ** root for it in (exact, coded))
            bound = want.abs().max() * (1 / steps + 1 / (2 * steps) ** 2) * (1 + 2**-20)  # what fp32 rounds on the way
            assert ((got - want).abs() <= bound).all()


def policies_reduce_in_fp32(rank):
    """bf16 grads are reduced in fp32."""
    results = []
    for make, clips in ((ours(max_norm=0.1), False), (torchs_fused, True)):
        model = shard(network(), "fsdp2", mp_policy=MixedPrecisionPolicy(param_dtype=B16, reduce_dtype=F32))
        trained(model, make, GradScaler("cpu", init_scale=64.0), clips=clips, spoils=rank == 0)
        results.append(wholes(model))
    assert all(map(are_close, *results))


def accumulated_grads_are_exchanged_once(rank):
    """Grads are exchanged once per group: until then no parameter has a part of one."""
    alone, model = network(), shard(network(), "fsdp2")
    inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(0))
    for it in (alone, model):
        optimizer, scaler = AdamW(it.parameters(), max_norm=0.1), GradScaler("cpu", init_scale=4.0)
        for micro in accumulate([inputs] * 8, 4, optimizer, model=it, scaler=scaler):
            micro.backward(it(micro.batch).square().mean())
            assert it is alone or all(param.grad is None for param in it.parameters())
    assert all(map(same_bits, wholes(model), wholes(alone)))


def released_grads_step_the_same(rank):
    """FSDP2 calls a parameter's hooks once its grad is reduced: there it can step, or shrink to 16 bits."""
    for options, scaled in (({"guard": False}, False), ({"max_norm": 0.1}, False), ({}, True)):
        alone, model = network(), shard(network(), "fsdp2")
        scalers = [GradScaler("cpu", init_scale=4.0, enabled=scaled) for _ in range(2)]
        for it, scaler in zip((alone, model), scalers, strict=True):
            optimizer = AdamW(it.parameters(), **options)
            release = optimizer.release_grads(scaler)
            for step in range(3):
                if step == 1:
                    with release.accumulate():
                        backward(it, step + 10, scaler.scale(torch.ones(())))
                backward(it, step, scaler.scale(torch.ones(())))
                assert all(p.grad is None or (not release.steps_alone and p.grad.dtype == B16) for p in it.parameters())
                scaler.step(optimizer)
                scaler.update()
                assert all(p.grad is None for p in it.parameters())
        assert all(map(same_bits, wholes(model), wholes(alone))), options


def no_objects_pile_up(rank):
    model = shard(network(), "fsdp2")
    optimizer = AdamW(model.parameters(), max_norm=1.0)
    backward(model, 0)
    counts = []
    for step in range(1001):
        optimizer.step()
        if step in (500, 1000):
            gc.collect()
            counts.append(len(gc.get_objects()))
    assert abs(counts[1] - counts[0]) <= 50


CHECKS = (
    *(moments_in_8_bits_are_near, policies_reduce_in_fp32),
    *(accumulated_grads_are_exchanged_once, released_grads_step_the_same),
    *(no_objects_pile_up, four_processes_train_as_one),
)


@in_processes
def test_four_processes(tmp_path):
    spawn(partial(run_checks, CHECKS), tmp_path, WORLD)
