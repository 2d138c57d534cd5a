import math

import pytest
import torch

from mpkernels.ops import grad_stats
from tests.cases import DTYPES, clones, every_place, odd_layouts, random_grads


def exact_sumsq(grad):
    return math.fsum((grad.double() ** 2).flatten().tolist())


def assert_close(got, want, terms):
    """Each of `terms` additions in fp64 rounds by at most 2^-53."""
    assert abs(got - want) <= max(terms, 1) * 2.0**-53 * want, (got, want)


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


def test_mixed_dtypes_at_every_size(target):
    assert_stats(random_grads(), target.device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_odd_layouts(target, dtype):
    assert_stats(odd_layouts(dtype), target.device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_place_to_begin_at(target, dtype):
    assert_stats(every_place(dtype)[:: 7 if target.is_interpreted else 1], target.device)


def test_expanded_grads_count_every_element(target):
    grad = torch.tensor([3.0], device=target.device).expand(50)
    assert grad_stats([grad]).sumsq.tolist() == [450.0]


@pytest.mark.parametrize("count", [1, 160, 161, 1354, 1355, 2709])
def test_any_number_of_tensors(target, count):
    count = min(count, 200) if target.is_interpreted else count
    assert_stats([torch.full((i % 5,), float(i)) for i in range(count)], target.device)


def test_more_chunks_than_a_block_has_threads(target):
    """test_triton_pieces has Triton's share."""
    if target.is_interpreted:
        pytest.skip("would take minutes")
    grad = torch.ones(257 * 8192, dtype=torch.float16, device=target.device)
    assert grad_stats([grad]).sumsq.tolist() == [grad.numel()]
    grad[-1] = math.nan
    assert grad_stats([grad]).nonfinite.tolist() == [1.0]


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bad_tensor_is_named(target, dtype, bad):
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


def test_the_smallest_values_are_not_lost(target):
    grad = torch.full((1000,), 1e-30, device=target.device)
    assert_close(grad_stats([grad]).total_sumsq.item(), 1000 * grad[0].double().item() ** 2, 1000)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_norm_is_no_worse_than_torchs(target, dtype):
    spread = torch.cat([torch.randn(100_000) * 1e-4, torch.tensor([30.0])])
    for grad in (torch.randn(100_001), torch.rand(100_001) * 1e-3, spread):
        grad = grad.to(dtype).to(target.device)
        exact = math.sqrt(exact_sumsq(grad.cpu()))
        ours = grad_stats([grad]).sumsq.sqrt().item()
        theirs = torch._foreach_norm([grad.float() if dtype.itemsize < 4 else grad])[0].item()
        assert abs(ours - exact) <= max(abs(theirs - exact), 1e-15 * exact)


def test_results_repeat_to_the_last_bit(target):
    grads = clones(random_grads(sizes=(100_003, 7, 33_000)), target.device)
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
    """To the last bit, but in CUDA C++, whose threads take what precedes the first aligned element by themselves."""
    values = (torch.randn(3001) * torch.logspace(-4, 3, 3001)).to(dtype)
    sums = []
    for begin in range(9):
        grad = torch.empty(3020, dtype=dtype, device=target.device)[begin : begin + 3001].copy_(values)
        sums.append(grad_stats([grad]).sumsq.item())
    is_by_cuda = target.kernel == "cuda" or (target.kernel, target.device.type) == ("native", "cuda")
    assert max(sums) - min(sums) <= (1e-14 * max(sums) if is_by_cuda else 0)


def test_grads_are_only_read(target):
    grads = clones(random_grads(), target.device)
    before = [grad.clone() for grad in grads]
    versions = [grad._version for grad in grads]
    grad_stats(grads)
    assert all(map(torch.equal, grads, before))
    assert [grad._version for grad in grads] == versions
