"""overflow_, and adamw_, which makes the same report: every kernel gives the reference's bits, which are right."""

import math

import pytest
import torch

import mpkernels
from mpkernels.ops import overflow_
from tests.hard_grads import DTYPES, clones, odd_layouts, random_grads, same_bits
from tests.ops.step.adamw_rows import Model
from tests.ops.step.rules_table import B16, F16, F32, F64, I8, WEIGHTS

INF, NAN = math.inf, math.nan


def with_infs_nans_and_zeros(grads, seed=1):
    """Set a tenth of the elements to inf, a tenth to NaN and a fifth to 0, some negative. The first four grads stay."""
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.tensor([INF, -INF, NAN, NAN, 0.0, -0.0, 0.0, 0.0])
    for grad in grads[4:]:
        which = torch.randint(0, 20, grad.shape, generator=generator)
        grad.copy_(torch.where(which < 8, kinds[which.clamp(max=7)], grad.double()).to(grad.dtype))
    return grads


def report_of(grads, device, found_inf=1.0, scale=None, unscaled=False, before=-7.0):
    report = torch.full((1 + len(grads), 6), before, dtype=torch.float64, device=device)
    found_inf, scale = (None if it is None else torch.full((), it, device=device) for it in (found_inf, scale))
    overflow_(clones(grads, device), found_inf, scale, unscaled, report)
    return report.cpu()


def line_by_hand(grad):
    values = grad.double().flatten().tolist()
    bad = [i for i, value in enumerate(values) if not math.isfinite(value)]
    finite = [abs(value) for value in values if math.isfinite(value)]
    infs, nans = sum(map(math.isinf, values)), sum(map(math.isnan, values))
    return [len(values), infs, nans, bad[0] if bad else INF, max(finite, default=0.0), finite.count(0.0)]


def test_reports_on_mixed_dtypes_are_right_at_every_size(target):
    grads = with_infs_nans_and_zeros(random_grads(sizes=(0, 1, 2, 33, 1025, 8193, 16385, 40000)))
    wanted = [[1.0, 3.0, 3.0, 0, 0, 0], *(line_by_hand(grad) for grad in grads)]
    assert same_bits(report_of(grads, target.device, scale=3.0), torch.tensor(wanted, dtype=torch.float64))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reports_on_odd_layouts_are_the_references(target, dtype):
    """An index counts in the grad's order of memory if the grad has no gaps."""
    grads = with_infs_nans_and_zeros(odd_layouts(dtype))
    with mpkernels.backend("reference"):
        wanted = report_of(grads, "cpu")
    assert same_bits(report_of(grads, target.device), wanted)


def test_an_index_counts_in_the_order_of_memory_unless_there_are_gaps():
    grad = torch.zeros(2, 3, 4).permute(2, 0, 1)
    grad[1, 1, 2] = INF  # number 12 + 2 * 4 + 1 in memory
    gaps = torch.zeros(4, 5)[:, ::2]
    gaps[1, 2] = NAN
    assert report_of([grad, gaps], "cpu")[1:, 3].tolist() == [21.0, 5.0]


@pytest.mark.parametrize(("scale", "unscaled", "on_grads"), [(None, False, 1.0), (3.0, False, 3.0), (3.0, True, 1.0)])
def test_the_first_line_has_the_scale_and_what_the_grads_are_multiplied_by(target, scale, unscaled, on_grads):
    heading, line = report_of([torch.tensor([-5.0, INF, 2.0])], target.device, -1.0, scale, unscaled).tolist()
    assert heading == [1.0, scale or 0.0, on_grads, 0.0, 0.0, 0.0]
    assert line == [3.0, 1.0, 0.0, 1.0, 5.0, 0.0]


@pytest.mark.parametrize("found_inf", [0.0, -0.0])
def test_nothing_is_written_where_nothing_overflowed(target, found_inf):
    grads = with_infs_nans_and_zeros(random_grads(sizes=(0, 5, 1025)))
    assert (report_of(grads, target.device, found_inf=found_inf) == -7.0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_a_single_inf_or_nan_is_found_at_any_place(target, dtype, bad):
    sizes = (1, 33, 8193, 16385) if not target.is_interpreted else (33, 16385)
    for size in sizes:
        for place in {0, size // 2, size - 1}:
            grads = [torch.ones(size, dtype=dtype), torch.full((3,), 2.0, dtype=dtype)]
            grads[0][place] = bad
            infs, nans = float(math.isinf(bad)), float(math.isnan(bad))
            largest = 1.0 if size > 1 else 0.0
            wanted = [[size, infs, nans, place, largest, 0.0], [3.0, 0.0, 0.0, INF, 2.0, 0.0]]
            assert report_of(grads, target.device)[1:].tolist() == wanted


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_at_the_ends_of_the_range_are_finite_and_not_zero(target, dtype):
    info = torch.finfo(dtype)
    values = torch.tensor([info.max, info.tiny, info.smallest_normal * info.eps, -0.0], dtype=torch.float64)
    assert report_of([values.to(dtype)], target.device)[1].tolist() == [4.0, 0.0, 0.0, INF, info.max, 1.0]


def test_a_grad_of_more_chunks_than_a_block_has_threads_is_reported(target):
    """tests/ops/test_triton_pieces.py tests the same for Triton."""
    if target.is_interpreted:
        pytest.skip("would take minutes")
    grad = torch.ones(257 * 8192, dtype=torch.float16)
    grad[-3:] = torch.tensor([INF, 0.0, 2.0])
    line = [grad.numel(), 1.0, 0.0, grad.numel() - 3, 2.0, 1.0]
    assert report_of([grad[:5], grad], target.device)[1:].tolist() == [[5.0, 0.0, 0.0, INF, 1.0, 0.0], line]


@pytest.mark.parametrize("count", [1, 161, 1355])
def test_any_number_of_tensors_is_reported(target, count):
    count = min(count, 20) if target.is_interpreted else count
    report = report_of([torch.full((1 + i % 5,), float(i)) for i in range(count)], target.device)
    assert report[1:, 4].tolist() == [float(i) for i in range(count)]


def test_grads_are_only_read(target):
    grads = clones(with_infs_nans_and_zeros(random_grads(sizes=(5, 1025))), target.device)
    before, versions = [grad.clone() for grad in grads], [grad._version for grad in grads]
    report_of(grads, target.device)
    assert all(map(same_bits, grads, before))
    assert [grad._version for grad in grads] == versions


def adamw_report(device, found_inf, dtype, sizes, **options):
    model = Model(sizes=sizes, device=device, **options)
    grads = with_infs_nans_and_zeros([grad.cpu().to(dtype) for grad in model.grads(0)])
    report = torch.full((1 + len(grads), 6), -7.0, dtype=torch.float64, device=device)
    model.step([grad.to(device) for grad in grads], grad_scale=3.0, found_inf=found_inf, report=report)
    return report.cpu(), grads


@pytest.mark.parametrize(
    ("weight", "state", "grad"),
    [(WEIGHTS[0], F32, F16), (WEIGHTS[1], B16, B16), (WEIGHTS[4], I8, F32), ((F64, "none"), F64, F64)],
    ids=str,
)
def test_adamw_reports_what_it_skips(target, weight, state, grad):
    sizes = (37, 8193, 20_000, 3)
    options = {"weights": [weight], "grads": (grad,), "states": (state,)}
    report, grads = adamw_report(target.device, 1.0, grad, sizes, **options)
    wanted = torch.tensor([[1.0, 3.0, 3.0, 0, 0, 0], *(line_by_hand(it) for it in grads)], dtype=torch.float64)
    assert same_bits(report, wanted)
    report, _ = adamw_report(target.device, 0.0, grad, sizes[:1], **options)
    assert (report == -7.0).all()


def test_adamw_reports_on_more_parameters_than_a_launch_takes(target):
    if target.is_interpreted:
        pytest.skip("has no such limit")
    options = {"weights": WEIGHTS[:1], "grads": (F32,), "states": (F32,)}
    report, grads = adamw_report(target.device, 1.0, F32, (5,) * 120, **options)
    assert report[1:].tolist() == [line_by_hand(grad) for grad in grads]


@pytest.mark.parametrize("state", [F32, I8], ids=str)
def test_adamw_counts_indices_in_the_parameters_order_of_memory(target, state):
    """A grad may have another layout than its parameter."""
    model = Model(sizes=(24,), weights=WEIGHTS[:1], grads=(F32,), states=(state,), device=target.device)
    for name in ("params", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"):
        tensors = [it.view(4, 6).t() if it.numel() else it for it in getattr(model, name)]
        setattr(model, name, tensors)
    model.params[1] = torch.zeros(6, 8, device=target.device)[:, ::2]  # with gaps, and amsgrad
    grads = [torch.ones(6, 4, device=target.device) for _ in model.params]
    for grad in grads:
        grad[1, 2] = INF
    report = torch.zeros(3, 6, dtype=torch.float64, device=target.device)
    model.step(grads, found_inf=1.0, report=report)
    assert report[1:, 3].tolist() == [13.0, 13.0 if state == I8 else 6.0]
