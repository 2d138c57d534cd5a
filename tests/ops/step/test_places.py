"""Arrays begin at odd places, and rounds, packs, chunks and blocks end anywhere: a kernel that reads several elements
at once must read the same ones. Sizes are above 2048, the elements of a CUDA block's round."""

import pytest
import torch

import mpkernels
from tests.ops.step.adamw_rows import Model, assert_the_references_bits
from tests.ops.step.rules_table import B16, F16, F32, F64, I8, WEIGHTS

pytestmark = pytest.mark.kernels("native", "triton", "cuda")  # all are compared with the reference
LISTS = ("params", "masters", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")


def moved(tensor, offset):
    """Return a copy that begins ``offset`` elements after a 64-byte boundary."""
    copy = tensor.new_empty(offset + tensor.numel())[offset:]
    return copy.copy_(tensor)


def assert_same_steps_from(target, offsets, **options):
    """Compare steps whose lists begin at these ``offsets``, by name; other lists at 0."""

    def steps(model):
        for name in LISTS:
            setattr(model, name, [moved(tensor, offsets.get(name, 0)) for tensor in getattr(model, name)])
        for seed in range(2):
            model.step([moved(grad, offsets.get("grads", 0)) for grad in model.grads(seed)])

    assert_the_references_bits(target, steps, **options)


def kinds(target, **more):
    """Return all kinds of rows, or few for an interpreted kernel."""
    few = {"weights": WEIGHTS[1:2], "grads": (B16,), "states": (F32,)} if target.is_interpreted else {}
    return {"weights": WEIGHTS, "states": (F32, B16, I8)} | more | few


@pytest.mark.each_value_once
@pytest.mark.parametrize("offset", range(20))
def test_all_arrays_may_begin_off_a_boundary(target, offset):
    """All arrays reach a boundary after equally many elements, as views of buckets do."""
    options = kinds(target, sizes=(2048 + 17,), weights=[WEIGHTS[offset % 5]], grads=(B16, F32))
    assert_same_steps_from(target, dict.fromkeys((*LISTS, "grads"), offset), **options)


@pytest.mark.parametrize("offset", [1, 4])
@pytest.mark.parametrize("name", ["grads", *LISTS])
def test_one_list_alone_may_begin_off_a_boundary_or_a_pack_after_it(target, name, offset):
    """A kernel must look at each list's addresses: packs that are aligned in the others are misaligned in this one."""
    options = kinds(target, sizes=(2048 + 3,), weights=WEIGHTS[:3], grads=(B16,))
    assert_same_steps_from(target, {name: offset}, **options)


def test_each_list_may_begin_at_an_offset_of_its_own(target):
    """All lists begin at the same place within four elements."""
    offsets = {name: 3 + 4 * i for i, name in enumerate((*LISTS, "grads"))}
    assert_same_steps_from(target, offsets, **kinds(target, sizes=(2048 + 5,), grads=(B16, F16)))


AROUND_ROUNDS = (0, 1, 4, 2047, 2048, 2049, 2051, 2052, 4095, 4096, 4097, 6147, 8192 + 2048 + 3)
INCOMPLETE_BLOCKS = (1, 31, 129, 255, 256, 257, 511, 2048 + 255, 4096 + 1)  # of 8-bit moments


@pytest.mark.each_value_once
@pytest.mark.parametrize("offset", [0, 1, 3, 4])
@pytest.mark.parametrize(("sizes", "state"), [(AROUND_ROUNDS, F32), (INCOMPLETE_BLOCKS, I8)], ids=["F32", "I8"])
def test_sizes_around_rounds_chunks_and_blocks_give_the_references_bits(target, sizes, state, offset):
    options = kinds(target, sizes=sizes, weights=WEIGHTS[:3], grads=(B16, F32)) | {"states": (state,)}
    assert_same_steps_from(target, dict.fromkeys((*LISTS, "grads"), offset), **options)


@pytest.mark.each_value_once
@pytest.mark.parametrize("offset", [0, 1])
def test_a_list_may_hold_fp64_and_other_dtypes(target, offset):
    """One launch takes all parameters. It isn't the one that takes lists without fp64."""
    model, alone = Model(sizes=(700,), device=target.device), Model(sizes=(700,))
    wide = {"sizes": (2049,), "weights": [(F64, "none")], "grads": (F64,), "states": (F64,), "device": target.device}
    both, reference = Model(**wide), Model(**(wide | {"device": "cpu"}))
    names = ("params", "masters", "scales", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "steps")
    for name in names:
        setattr(both, name, [moved(it, offset) if it.ndim else it for it in getattr(both, name)])
    plain = {"lr": [1e-2] * 2, "beta1": [0.9] * 2, "beta2": [0.999] * 2, "weight_decay": [0.01] * 2}
    plain |= {"eps": [1e-8] * 2, "maximize": [False] * 2}
    joined = Model(sizes=())
    for name in names:
        setattr(joined, name, getattr(model, name) + getattr(both, name))
    joined.device = target.device
    joined.step(model.grads(0) + both.grads(0), **plain)
    with mpkernels.backend("reference"):
        alone.step(alone.grads(0), **plain)
        reference.step(reference.grads(0), **plain)
    assert model.differences(alone) == []
    for ours, theirs in zip(both.params, reference.params, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-15, atol=0)
