"""grad_stats: every kernel adds the same packs in the same order, and finds inf and NaN."""

import math

import pytest
import torch

import mpkernels
from mpkernels.ops import grad_stats
from tests.hard_grads import DTYPES, SIZES, clones, every_place, odd_layouts, random_grads


def exact_sumsq(grad):
    return math.fsum((grad.double() ** 2).flatten().tolist())


PACK_ERROR = 4.001 * 2.0**-24  # fp32 rounds a square and three additions, each by 2^-24 at most
PACK_ERROR_16_BIT = 3.001 * 2.0**-24  # squares of 16-bit grads have at most 22 bits: they are exact


def assert_close(got, want, terms):
    """Each of `terms` additions in fp64 rounds by at most 2^-53."""
    assert abs(got - want) <= (PACK_ERROR + max(terms, 1) * 2.0**-53) * want, (got, want)


def assert_same_sums(grads, device):
    """Compare with the reference, to the last bit."""
    got = grad_stats(clones(grads, device)).sumsq.tolist()
    with mpkernels.backend("reference"):
        want = grad_stats(grads).sumsq.tolist()
    wrong = [(it.dtype, it.shape, it.stride()) for it, a, b in zip(grads, got, want, strict=True) if a != b]
    assert not wrong, (len(wrong), wrong[:5])


def numbers_of_similar_size(count, dtype, seed=3):
    """Return numbers of magnitudes from 1 to 2. fp64 holds all sums of packs exactly, in any order; fp32 holds no sum
    of a pack exactly. So equal bits mean equal packs, whose squares are added in the same order."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(count, generator=generator) + 1
    return (sizes * torch.randn(count, generator=generator).sign()).to(torch.float32 if dtype.itemsize > 2 else dtype)


def assert_stats(grads, device):
    stats = grad_stats(clones(grads, device))
    assert [tuple(x.shape) for x in stats] == [(len(grads),), (len(grads),), (), ()]
    assert [x.dtype for x in stats] == [torch.float64, torch.float32, torch.float64, torch.float32]
    want = [exact_sumsq(grad) for grad in grads]
    for got, exact, grad in zip(stats.sumsq.tolist(), want, grads, strict=True):
        assert_close(got, exact, grad.numel())
    assert_close(stats.total_sumsq.item(), math.fsum(want), sum(grad.numel() for grad in grads))
    assert stats.nonfinite.tolist() == [0.0] * len(grads)
    assert stats.found_inf.item() == 0.0


def test_sums_of_mixed_dtypes_are_right_at_every_size(target):
    assert_stats(random_grads(), target.device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_are_right_in_odd_layouts(target, dtype):
    assert_stats(odd_layouts(dtype), target.device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_are_right_wherever_a_grad_begins(target, dtype):
    assert_stats(every_place(dtype)[:: 7 if target.is_interpreted else 1], target.device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_every_kernel_adds_the_same_packs(target, dtype):
    values = numbers_of_similar_size(70_000, dtype)
    sizes = (*SIZES, 63, 65, 2047, 2049, 5000, 16384, 16392, 65_537)
    step = 5 if target.is_interpreted else 1
    grads = [values[i % 9 :][:size] for i, size in enumerate(sizes)][::step]
    placed = [*every_place(dtype)[:: 3 * step], *odd_layouts(dtype)]
    for grad in placed:
        if 0 not in grad.stride():
            grads.append(grad.copy_(values[: grad.numel()].view(grad.shape)))
    assert_same_sums(grads, target.device)


@pytest.mark.parametrize("power", [-149, -126, -75, -53, -52, -51, -50, -49, 48, 49, 50, 60, 127])
def test_what_fp32_would_lose_is_added_in_fp64(target, power):
    """Squares that fp32 lacks, or holds with few bits, stand alone and beside packs of ordinary ones."""
    generator = torch.Generator().manual_seed(power)
    grads = []
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.rand(3001, generator=generator, dtype=torch.float64).add(0.5) * 2.0**power
        mixed = torch.randn(3001, generator=generator, dtype=torch.float64)
        mixed[::17], mixed[1000:1024] = x[::17], x[1000:1024]
        alone = torch.zeros(100, dtype=torch.float64)
        alone[37] = x[37]
        grads += [each.to(dtype) for each in (x, mixed, alone)]
    for got, grad in zip(grad_stats(clones(grads, target.device)).sumsq.tolist(), grads, strict=True):
        assert_close(got, exact_sumsq(grad), grad.numel())


def test_packs_at_the_bounds_of_fp32_sums_are_added_as_by_the_reference(target):
    """Packs with sums from 2^-100 to 2^100 are added in fp32, others in fp64, with the same sum to more places."""
    grads = []
    for root in torch.tensor([2.0**-50, 1.0, 2.0**50]):
        for nearly in (root, torch.nextafter(root, torch.zeros(())), torch.nextafter(root, torch.tensor(torch.inf))):
            grads += [nearly.reshape(1), nearly.repeat(8), torch.cat([nearly.reshape(1), root.repeat(7) * 2.0**-13])]
    assert_same_sums(grads, target.device)


def test_zeros_add_nothing(target):
    grads = [torch.zeros(20_000), -torch.zeros(7), torch.zeros(9000, dtype=torch.bfloat16)]
    grads[0][16_390] = 3.0
    assert grad_stats(clones(grads, target.device)).sumsq.tolist() == [9.0, 0.0, 0.0]


def test_expanded_grads_count_every_element(target):
    grad = torch.tensor([3.0], device=target.device).expand(50)
    assert grad_stats([grad]).sumsq.tolist() == [450.0]


@pytest.mark.parametrize(
    "count", [1, 160, 161, 1355, *(pytest.param(it, marks=pytest.mark.exhaustive) for it in (1354, 2709))]
)
def test_sums_of_any_number_of_tensors_are_right(target, count):
    count = min(count, 200) if target.is_interpreted else count
    assert_stats([torch.full((i % 5,), float(i)) for i in range(count)], target.device)


def test_a_grad_of_more_chunks_than_a_block_has_threads_is_summed(target):
    """tests/ops/test_triton_pieces.py tests the same for Triton."""
    if target.is_interpreted:
        pytest.skip("would take minutes")
    grad = torch.ones(257 * 8192, dtype=torch.float16, device=target.device)
    assert grad_stats([grad]).sumsq.tolist() == [grad.numel()]
    grad[-1] = math.nan
    assert grad_stats([grad]).nonfinite.tolist() == [1.0]


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_grad_with_an_inf_or_nan_is_flagged(target, dtype, bad):
    for size in (1, 33, 1024, 8193):
        for place in {0, size // 2, size - 1}:
            grads = random_grads(dtypes=(dtype,), sizes=(5, size, 0, 40))
            grads[1][place] = bad
            stats = grad_stats(clones(grads, target.device))
            assert stats.nonfinite.tolist() == [0.0, 1.0, 0.0, 0.0], f"{bad} at {place} of {size}"
            assert stats.found_inf.item() == 1.0
            assert not math.isfinite(stats.total_sumsq.item())
            assert_close(stats.sumsq[3].item(), exact_sumsq(grads[3]), 40)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_finite_values_are_finite(target, dtype):
    """Norms beyond fp16, squares beyond fp32 are no overflow; the flag follows the grads even if fp64 overflows."""
    stats = grad_stats([torch.full((1000,), torch.finfo(dtype).max, dtype=dtype, device=target.device)])
    assert stats.nonfinite.tolist() == [0.0]
    assert stats.found_inf.item() == 0.0
    assert math.isfinite(stats.total_sumsq.item()) == (dtype != torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_norm_is_no_worse_than_torchs(target, dtype):
    spread = torch.cat([torch.randn(100_000) * 1e-4, torch.tensor([30.0])])
    for grad in (torch.randn(100_001), torch.rand(100_001) * 1e-3, spread):
        grad = grad.to(dtype).to(target.device)
        exact = math.sqrt(exact_sumsq(grad.cpu()))
        ours = grad_stats([grad]).sumsq.sqrt().item()
        theirs = torch._foreach_norm([grad.float() if dtype.itemsize < 4 else grad])[0].item()
        floor = {4: PACK_ERROR, 2: PACK_ERROR_16_BIT}.get(dtype.itemsize, 1e-15) / 2  # a root halves a relative error
        assert abs(ours - exact) <= max(abs(theirs - exact), floor * exact)


def test_results_repeat_to_the_last_bit(target):
    grads = clones(random_grads(sizes=(40_003 if target.is_interpreted else 100_003, 7, 33_000)), target.device)
    threads = torch.get_num_threads()
    try:
        runs = []
        for count in (2, 2, 2) if target.kernel == "reference" else (1, 2, 3, 1, 2):  # torch's own sum depends on it
            torch.set_num_threads(count)
            runs.append(grad_stats(grads))
    finally:
        torch.set_num_threads(threads)
    for run in runs[1:]:
        assert all(map(torch.equal, run, runs[0]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sum_does_not_depend_on_where_the_grad_begins(target, dtype):
    """From 4096 elements on, Triton reads 16 bytes at a time from a grad that begins at a multiple of 16."""
    values = (torch.randn(5001) * torch.logspace(-4, 3, 5001)).to(dtype)
    sums = []
    for begin in range(9):
        grad = torch.empty(5020, dtype=dtype, device=target.device)[begin : begin + 5001].copy_(values)
        sums.append(grad_stats([grad]).sumsq.item())
    assert len(set(sums)) == 1


def test_grads_are_only_read(target):
    grads = clones(random_grads(), target.device)
    before = [grad.clone() for grad in grads]
    versions = [grad._version for grad in grads]
    grad_stats(grads)
    assert all(map(torch.equal, grads, before))
    assert [grad._version for grad in grads] == versions
