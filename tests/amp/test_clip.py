"""clip_grad_norm_ beside torch's, and where torch's goes wrong."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mpkernels.amp import clip_grad_norm_, clipping
from tests.hard_grads import DTYPES, clones, odd_layouts, random_grads, same_bits
from tests.networks import B16, F16, backward, network

NORM_TYPES = (2, 2.0, 1, 3, 0.5, math.inf)


def params_of(grads, device="cpu"):
    params = []
    for grad in clones(grads, device):
        params.append(torch.empty_like(grad).requires_grad_())
        params[-1].grad = grad
    return params


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("max_norm", [1e-3, 1e9, 1])
def test_fp32_grads_are_clipped_as_by_torch(target, norm_type, max_norm):
    """torch's sums are rounded some 10 times in a row, in fp32; our sum is rounded once."""
    ours, theirs = network(device=target.device), network(device=target.device)
    for model in (ours, theirs):
        backward(model, 0)
    got = clip_grad_norm_(ours.parameters(), max_norm, norm_type)
    want = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm, norm_type)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    torch.testing.assert_close(got, want, rtol=2e-6, atol=0)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=4e-6, atol=0)


@pytest.mark.parametrize("dtypes", [*[(dtype,) for dtype in DTYPES], DTYPES], ids=str)
def test_grads_of_any_dtypes_and_layouts_are_clipped(target, dtypes):
    grads = [*random_grads(dtypes, sizes=(0, 1, 33, 1025)), *(it for dtype in dtypes for it in odd_layouts(dtype))]
    exact = torch.cat([grad.double().flatten() for grad in grads]).norm()
    params = params_of(grads, target.device)
    norm = clip_grad_norm_(params, 0.25)
    assert norm.dtype == (torch.float64 if torch.float64 in dtypes else torch.float32)
    torch.testing.assert_close(norm.double().cpu(), exact, rtol=2**-23, atol=0)
    coefficient = (0.25 / (norm + 1e-6)).cpu()
    for param, grad in zip(params, grads, strict=True):
        wide = grad.dtype == torch.float64
        want = grad.double() * coefficient if wide else grad.float() * coefficient.float()
        assert same_bits(param.grad.cpu(), want.to(grad.dtype))


@pytest.mark.parametrize(("grad", "max_norm"), [(2.0, 5.0), (math.inf, 1.0), (math.nan, 1.0)])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64], ids=str)
def test_grads_that_need_no_clipping_are_not_written_on_a_cpu(dtype, grad, max_norm):
    """Writing the grads would take as long as a third of the step."""
    params = params_of([torch.full((4,), grad, dtype=dtype), torch.empty(0)])
    versions = [param.grad._version for param in params]
    clip_grad_norm_(params, max_norm)
    assert [param.grad._version for param in params] == versions
    clip_grad_norm_(params, 0.5)
    assert (params[0].grad._version > versions[0]) == math.isfinite(grad)


def test_the_host_asks_no_other_device_whether_grads_need_clipping():
    assert clipping._is_known_one(torch.ones(()))
    assert not clipping._is_known_one(torch.ones((), device="meta"))
    with FakeTensorMode():
        assert not clipping._is_known_one(torch.ones(()))


@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_clipping_is_one_graph_whatever_the_norm(max_norm):
    ours, compiled = (params_of(random_grads((torch.float32, B16))) for _ in range(2))
    clip = torch.compile(lambda: clip_grad_norm_(compiled, max_norm), fullgraph=True, backend="eager")
    assert same_bits(clip(), clip_grad_norm_(ours, max_norm))
    assert all(same_bits(a.grad, b.grad) for a, b in zip(ours, compiled, strict=True))


def test_an_fp16_norm_beyond_65504_is_finite():
    """torch's norm would be inf, and every grad silently 0."""
    grads = [torch.full((100,), 60000.0, dtype=F16), torch.full((3,), 1.0)]
    params = params_of(grads)
    assert clip_grad_norm_(params, 60.0).item() == pytest.approx(600000.0)
    torch.testing.assert_close(params[0].grad, torch.full((100,), 6.0, dtype=F16))
    torch.testing.assert_close(params[1].grad, torch.full((3,), 1e-4))


def test_squares_beyond_fp32_are_no_overflow():
    for norm_type in (2, 3, 1):
        params = params_of([torch.full((4,), 1e30)])
        assert clip_grad_norm_(params, 1.0, norm_type).item() == pytest.approx(1e30 * 4 ** (1 / norm_type))
        assert params[0].grad.isfinite().all()
        assert (params[0].grad > 0).all()


@pytest.mark.parametrize("norm_type", [2, 1, 3, math.inf])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_leaves_the_grads_as_they_are(target, bad, norm_type):
    """torch makes every grad NaN or 0."""
    grads = [torch.tensor([1.0, bad]), torch.tensor([2.0], dtype=B16)]
    params = params_of(grads, target.device)
    assert not clip_grad_norm_(params, 0.1, norm_type).isfinite()
    assert all(same_bits(param.grad.cpu(), grad) for param, grad in zip(params, grads, strict=True))


def test_error_if_nonfinite_raises_and_leaves_the_grads():
    params = params_of([torch.tensor([1.0, math.inf])])
    with pytest.raises(RuntimeError, match="for gradients from `parameters` is non-finite, so it cannot be clipped"):
        clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
    assert params[0].grad.tolist() == [1.0, math.inf]
    clip_grad_norm_(params_of([torch.ones(2)]), 1.0, error_if_nonfinite=True)


def test_one_tensor_a_missing_grad_and_no_parameters_are_taken():
    (param,) = params_of([torch.full((4,), 2.0)])
    assert clip_grad_norm_(param, 1.0, foreach=True).item() == 4.0
    without = torch.ones(3, requires_grad=True)
    assert clip_grad_norm_([without], 1.0).item() == clip_grad_norm_([], 1.0).item() == 0.0
    assert clip_grad_norm_(params_of([torch.empty(0)]), 1.0, math.inf).item() == 0.0
    with pytest.warns(UserWarning, match="is an empty generator, no gradient clipping will occur"):
        clip_grad_norm_((each for each in ()), 1.0)


def test_a_grad_that_is_part_of_a_graph_is_clipped():
    param = torch.ones(3, requires_grad=True)
    (param.grad,) = torch.autograd.grad(param.square().sum(), [param], create_graph=True)
    clip_grad_norm_([param], 1.0)
    assert param.grad.norm().item() == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_grads_are_clipped_as_by_torch(target, dtype, norm_type):
    """Ours are lazily conjugated, which torch refuses."""
    results = []
    for clip in (clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
        params = params_of([torch.tensor([3 + 4j, 1j, 0], dtype=dtype), torch.tensor([-2.0, 5.0])], target.device)
        grad = params[0].grad.conj()
        params[0].grad = grad if clip is clip_grad_norm_ else grad.resolve_conj()
        norm = clip(params, 1.0, norm_type)
        results.append((norm, [param.grad.resolve_conj() for param in params]))
    torch.testing.assert_close(*results, rtol=4e-6, atol=0)


@pytest.mark.parametrize("default", [B16, torch.float64], ids=str)
def test_another_default_dtype_changes_nothing(target, default):
    results = []
    for norm_type in (2, 1):
        for dtype in (torch.float32, default):
            params = params_of([*random_grads((torch.float32, B16)), torch.empty(0)], target.device)
            try:
                torch.set_default_dtype(dtype)
                results.append((clip_grad_norm_(params, 1.0, norm_type), [param.grad for param in params]))
            finally:
                torch.set_default_dtype(torch.float32)
        torch.testing.assert_close(*results[-2:], rtol=0, atol=0)
