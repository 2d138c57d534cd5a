"""unscale_: every kernel gives the reference's bits, and finds what overflows by unscaling."""

import pytest
import torch

from mpkernels.ops import unscale_
from tests.hard_grads import DTYPES, SIZES, clones, every_place, odd_layouts, random_grads, same_bits


def unscaled_copies(grads, inv_scale, device):
    """Return unscaled copies of the grads, and found_inf."""
    grads = clones(grads, device)
    found_inf = torch.zeros((), device=device)
    unscale_(grads, found_inf, torch.tensor(inv_scale, dtype=torch.float32, device=device))
    return [grad.cpu() for grad in grads], found_inf.item()


def expected(grad, inv_scale):
    """Return the product in the compute dtype, rounded once."""
    compute = torch.promote_types(grad.dtype, torch.float32)
    return (grad.to(compute) * torch.tensor(inv_scale, dtype=torch.float32).to(compute)).to(grad.dtype)


def assert_unscaled(grads, inv_scale, device):
    got, found_inf = unscaled_copies(grads, inv_scale, device)
    want = [expected(grad, inv_scale) for grad in grads]
    for i, pair in enumerate(zip(got, want, strict=True)):
        assert same_bits(*pair), f"grads[{i}] of {grads[i].dtype}, {tuple(grads[i].shape)}"
    assert found_inf == float(any(not grad.isfinite().all() for grad in want))


@pytest.mark.parametrize("inv_scale", [1.0, 1 / 65536, 1 / 3, 0.0, -1.5])
def test_mixed_dtypes_are_unscaled_at_every_size(target, inv_scale):
    assert_unscaled(random_grads(), inv_scale, target.device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_odd_layouts_are_unscaled(target, dtype):
    assert_unscaled(odd_layouts(dtype), 1 / 3, target.device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_grads_are_unscaled_wherever_they_begin(target, dtype):
    assert_unscaled(every_place(dtype)[:: 7 if target.is_interpreted else 1], 1 / 3, target.device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_elements_beside_a_grad_stay_as_they_are(target, dtype):
    """Some grads have a head, whole blocks and a tail, others lie within one of these."""
    for size in (1, 2, 7, 2047, 2050, 4103):
        for offset in (1, 2, 3, 7):
            storage = torch.ones(offset + size + 9, dtype=dtype, device=target.device)
            grad = storage[offset : offset + size]
            unscale_([grad], torch.zeros((), device=target.device), torch.tensor(0.5, device=target.device))
            want = torch.ones_like(storage)
            want[offset : offset + size] = 0.5
            assert torch.equal(storage, want), f"{size} at {offset}"


def test_memory_between_the_elements_is_left_alone(target):
    base = torch.arange(100.0, device=target.device)
    unscale_([base[::2]], torch.zeros((), device=target.device), torch.tensor(2.0, device=target.device))
    assert torch.equal(base[1::2].cpu(), torch.arange(100.0)[1::2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inv_scale", [1.0, 1 / 1024, 0.7, 3.0])
def test_every_16_bit_pattern_is_unscaled(target, dtype, inv_scale):
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    assert_unscaled([patterns], inv_scale, target.device)


def test_fp32_denormals_and_signed_zeros_are_unscaled(target):
    tiny = torch.tensor([1e-45, -1e-45, 1e-40, 1.2e-38, 0.0, -0.0, 3e38], dtype=torch.float32)
    assert_unscaled([tiny, tiny.repeat(7)], 0.5, target.device)
    assert_unscaled([tiny], 1.0, target.device)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_bad_element_anywhere_is_found(target, dtype, bad):
    for size in (1, 33, 1024, 8193):
        for place in {0, size // 2, size - 1}:
            grads = random_grads(dtypes=(dtype,), sizes=(5, size, 40))
            grads[1][place] = bad
            _, found_inf = unscaled_copies(grads, 0.25, target.device)
            assert found_inf == 1.0, f"{bad} at {place} of {size}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_overflow_by_unscaling_is_found(target, dtype):
    """With a scale below 1, a finite scaled grad may become inf when unscaled. torch misses it, and steps with inf."""
    largest = torch.finfo(dtype).max
    for inv_scale, overflows in (
        (1.0, 0.0),
        (1.0 + 2**-20, float(dtype in (torch.float32, torch.float64))),
        (2.0, 1.0),
    ):
        got, found_inf = unscaled_copies([torch.full((37,), largest, dtype=dtype)], inv_scale, target.device)
        assert found_inf == overflows
        assert got[0].isinf().all().item() == bool(overflows)


def test_found_inf_is_never_taken_back(target):
    found_inf = torch.ones((), device=target.device)
    unscale_([torch.ones(3, device=target.device)], found_inf, torch.ones((), device=target.device))
    assert found_inf.item() == 1.0


def test_scalars_may_have_one_dimension(target):
    grad, found_inf = torch.full((3,), 8.0, device=target.device), torch.zeros(1, device=target.device)
    unscale_([grad], found_inf, torch.full((1,), 0.5, device=target.device))
    assert grad.tolist() == [4.0] * 3
    assert found_inf.tolist() == [0.0]


@pytest.mark.parametrize(
    "count", [0, 1, 160, 161, 1355, *(pytest.param(it, marks=pytest.mark.exhaustive) for it in (1354, 2709))]
)
def test_any_number_of_tensors_is_unscaled(target, count):
    count = min(count, 200) if target.is_interpreted else count
    grads = [torch.full((i % 5,), float(i)) for i in range(count)]
    assert_unscaled(grads, 0.5, target.device)


def test_the_bits_are_those_of_torchs_scaler(target):
    """Each list has one dtype, because torch takes no other."""
    for dtype in DTYPES:
        grads = random_grads(dtypes=(dtype,))
        ours, _ = unscaled_copies(grads, 1 / 1000, target.device)
        theirs = clones(grads)
        torch._amp_foreach_non_finite_check_and_unscale_(theirs, torch.zeros(()), torch.tensor(1 / 1000))
        assert all(map(same_bits, ours, theirs))


def test_sizes_reach_every_chunk_boundary():
    assert len(SIZES) == len(set(SIZES))
    for cut in (32, 1024, 4096, 16384, 32768):  # SIMD block, Triton block, CUDA, Triton and CPU chunk
        assert {size < cut for size in SIZES} == {True, False}
