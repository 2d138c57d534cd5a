"""Each test was written for a planted bug that all other tests had let pass."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from mpkernels.ops import grad_stats, unscale_


def fp32(bits):
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32)


def zero(target):
    return torch.zeros((), device=target.device)


def half(target):
    return torch.full((), 0.5, device=target.device)


@pytest.mark.parametrize(
    ("dtype", "largest"),
    [(torch.float16, 0x477FEFFF), (torch.bfloat16, 0x7F7F7FFF), (torch.float32, 0x7F7FFFFF)],
    ids=str,
)
def test_overflow_begins_at_the_first_value_that_rounds_to_inf(target, dtype, largest):
    for bits, overflows in ((largest, 0.0), (largest + 1, 1.0)):
        grad, found_inf = torch.ones(37, dtype=dtype, device=target.device), zero(target)
        unscale_([grad], found_inf, fp32(bits).to(target.device))
        assert found_inf.item() == overflows
        assert grad.isinf().all().item() == ((dtype != torch.float32 and overflows == 1.0) or bits == 0x7F800000)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_nan_whose_upper_bits_are_infs_stays_nan(target, dtype):
    """The first NaN's payload lies in bits that 16 bits lack. Rounding the second NaN up would carry into the sign."""
    for bits in (0x7F800001, 0x7FFFFFFF):
        grad, found_inf = torch.ones(37, dtype=dtype, device=target.device), zero(target)
        unscale_([grad], found_inf, fp32(bits).to(target.device))
        assert grad.isnan().all()
        assert found_inf.item() == 1.0


def test_flags_are_0_or_1_however_many_are_bad(target):
    bad = torch.full((40_000,), float("inf"), device=target.device)
    stats = grad_stats([bad, bad])
    assert stats.nonfinite.tolist() == [1.0, 1.0]
    assert stats.found_inf.item() == 1.0


def test_a_tail_is_not_mistaken_for_zeros(target):
    """inv_scale = inf makes 0 a NaN, and everything else an inf: what fills up the last block must not count."""
    grads = [torch.ones(33, device=target.device), torch.full((1,), -2.0, device=target.device)]
    unscale_(grads, zero(target), torch.full((), float("inf"), device=target.device))
    assert all(grad.isinf().all() for grad in grads)


def test_writing_to_a_copy_on_write_clone_changes_only_the_clone(target):
    """A lazy clone shares its memory until one of the two is written."""
    grad = torch.ones(100, device=target.device)
    clone = torch._lazy_clone(grad)
    unscale_([clone], zero(target), half(target))
    assert (grad[0].item(), clone[0].item()) == (1.0, 0.5)
    found_inf = zero(target)
    flag = torch._lazy_clone(found_inf)
    unscale_([torch.full((3,), float("inf"), device=target.device)], flag, half(target))
    assert (found_inf.item(), flag.item()) == (0.0, 1.0)


def test_an_op_that_only_reads_leaves_lazy_clones_shared(target):
    if target.kernel == "triton":
        pytest.skip("data_ptr() is all that Python has, and it ends the sharing")
    clone = torch._lazy_clone(torch.ones(100, device=target.device))
    grad_stats([clone])
    assert torch._C._is_cow_tensor(clone)


def test_ops_keep_no_grad_alive(target):
    grad = torch.ones(5, device=target.device)
    memory = StorageWeakRef(grad.untyped_storage())
    unscale_([grad], zero(target), half(target))
    grad_stats([grad])
    del grad
    assert memory.expired()


@pytest.mark.parametrize(
    "scalars", [(torch.zeros(1).to_sparse(), torch.ones(())), (torch.zeros(()), torch.ones((), device="meta"))]
)
def test_scalars_on_another_device_or_sparse_are_refused(scalars):
    grad = torch.ones(3)
    with pytest.raises(ValueError, match=r"unscale_: (found_inf|inv_scale) must be"):
        unscale_([grad], *scalars)
    assert grad.tolist() == [1.0] * 3


def test_autograd_notices_changed_grads_that_came_in_an_iterator(target):
    grad = torch.ones(3, device=target.device)
    unscale_(iter([grad]), zero(target), half(target))
    assert grad.tolist() == [0.5] * 3
    assert grad._version > 0


def test_a_tuple_of_views_of_one_memory_is_unscaled(target):
    base = torch.ones(64, device=target.device)
    unscale_((base[:32], base[32:]), zero(target), half(target))
    assert base.tolist() == [0.5] * 64
