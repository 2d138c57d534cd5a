"""More than 2^31 elements: an index that is 32 bits wide anywhere would wrap."""

import numpy as np
import pytest
import torch

from mpkernels.ops import grad_stats, unscale_
from mpkernels.ops.linear.linear_act import _linear_act, _linear_act_backward
from mpkernels.ops.linear.linear_dact import _linear_dact
from tests.linear_cases import integers

SIZE = 2**31 + 11


def zeros(device):
    if device.type == "cuda":
        return torch.zeros(SIZE, dtype=torch.bfloat16, device=device)
    # The system gives a page of these zeros only when it is written.
    return torch.from_numpy(np.zeros(SIZE, dtype=np.int16)).view(torch.bfloat16)


def test_the_last_element_of_a_huge_grad_counts(target):
    if target.device.type == "cpu" and target.kernel != "native":
        pytest.skip(f"minutes or 16 GB for the {target.kernel} kernel")
    grads = zeros(target.device)
    grads[-1] = 3.0
    stats = grad_stats([torch.ones(2, device=target.device), grads])
    assert stats.sumsq.tolist() == [2.0, 9.0]

    found_inf, inv_scale = torch.zeros((), device=target.device), torch.full((), 0.5, device=target.device)
    unscale_([grads], found_inf, inv_scale)
    assert (grads[-1].item(), found_inf.item()) == (1.5, 0.0)
    grads[-1] = float("inf")
    unscale_([grads], found_inf, inv_scale)
    assert found_inf.item() == 1.0


def test_triton_addresses_beyond_32_bits():
    """A row whose first chunk lies far before the one that runs: the address must come out right, in 64 bits."""
    from mpkernels.ops import _tensor_table
    from mpkernels.ops.grads import unscale_triton

    chunk = _tensor_table.CHUNK_BYTES // 4
    skipped_chunks = SIZE // chunk
    skipped = skipped_chunks * chunk
    device = "cuda" if torch.cuda.is_available() else "cpu"  # where Triton runs compiled, or interpreted
    grads = torch.full((37,), 8.0, device=device)
    rows = torch.tensor([skipped + 37, -skipped_chunks, chunk, 0, 0], dtype=torch.int64, device=device)
    call = torch.tensor([grads.data_ptr() - 4 * skipped], dtype=torch.int64, device=device)
    found_inf, inv_scale = torch.zeros((), device=device), torch.full((), 0.5, device=device)
    unscale_triton.unscale_kernel[(1,)](rows, call, 1, found_inf, inv_scale)
    assert grads.tolist() == [4.0] * 37


@pytest.fixture
def memory(target, monkeypatch, tmp_path):
    """Return more than 2^31 zeros. As many lie before them, where an index that wraps finds them. On a CPU, they are a
    file that takes no room on the disk. Triton's interpreter would copy it in each launch, and is patched not to."""
    size = 2**32 + 256
    if target.is_interpreted:
        from triton.runtime.interpreter import GridExecutor

        monkeypatch.setattr(GridExecutor, "_init_args_hst", lambda self, *arguments: arguments)
        monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda self, *arguments: None)
    if target.device.type == "cuda":
        return torch.zeros(size, dtype=torch.bfloat16, device=target.device)[2**31 :]
    return torch.from_numpy(np.memmap(tmp_path / "zeros", np.int16, "w+", shape=size)).view(torch.bfloat16)[2**31 :]


FAR = {"rows": ((9, 3), (2**28, 1)), "columns": ((3, 9), (1, 2**28)), "steps of 32 columns": ((3, 33), (1, 2**26))}


@pytest.mark.parametrize(("shape", "strides"), FAR.values(), ids=FAR)
def test_a_matrix_spread_over_more_than_32_bits_is_read_right(target, memory, shape, strides):
    """Each argument of linear_act, of its backward and of linear_dact is such a matrix once."""
    near = integers(*shape, device=target.device)
    far = memory.as_strided(shape, strides).copy_(near)
    rows, columns = shape
    other, beside, bias = (integers(*it, device=target.device) for it in ((5, columns), (rows, columns), (rows,)))
    rest = "relu2", torch.float32, True
    # cuBLAS 13.0 wraps if it adds a bias. Then torch's layer is wrong, and so are our kernels that use torch's product.
    products = (torch.nn.functional.linear(other, weight, bias) for weight in (far, near))
    bias = bias if target.kernel == "triton" or torch.equal(*products) else None
    for op, arguments in (
        (_linear_act, lambda matrix: (matrix, other, None, "relu2", True)),
        (_linear_act, lambda matrix: (other, matrix, bias, "relu2", True)),
        (_linear_act_backward, lambda matrix: (matrix, None, None, beside, "relu2", None, torch.float32)),
        (_linear_act_backward, lambda matrix: (beside, None, None, matrix, "relu2", None, torch.float32)),
        (_linear_dact, lambda matrix: (matrix, other.new_ones(columns, 4), other.new_ones(rows, 4), *rest)),
        (_linear_dact, lambda matrix: (other.new_ones(4, rows), matrix, other.new_ones(4, columns), *rest)),
        (_linear_dact, lambda matrix: (other.new_ones(rows, 4), other.new_ones(4, columns), matrix, *rest)),
    ):
        for got, want in zip(op(*arguments(far)), op.reference(*arguments(near)), strict=True):
            assert torch.equal(got, want)


def test_triton_writes_to_matrices_beyond_32_bits(target, memory):
    """The matrices are the first columns of nine rows that are 2^28 elements long."""
    if target.kernel != "triton":
        pytest.skip("launches Triton's kernels")
    from mpkernels.ops.linear.linear_act_triton import dact_kernel, linear_act_kernel
    from mpkernels.ops.linear.linear_dact_triton import linear_dact_kernel

    rows, width, block = 9, 2**28, {"BLOCK_M": 16, "BLOCK_N": 16}
    x, weight = (integers(*shape, device=target.device) for shape in ((rows, 3), (16, 3)))
    strides, product = (*x.stride(), *weight.stride()), x.float() @ weight.float().t()
    as_product = {"PRECISION": "ieee", **block, "BLOCK_K": 16}
    y, z = (far.as_strided((rows, 16), (width, 1)) for far in (memory, memory[64:]))

    linear_act_kernel[(1,)](
        x, weight, None, memory, memory[64:], rows, width, 3, *strides, ACTIVATION="relu", **as_product
    )
    assert torch.equal(y.float(), product.relu())
    assert torch.equal(z.float(), product)

    strides = *x.stride(), *weight.t().stride(), 0, 0
    ones = torch.ones(1, dtype=x.dtype, device=target.device)
    linear_dact_kernel[(1,)](
        x, weight, ones, memory, None, memory[64:], rows, width, 3, *strides, ACTIVATION="relu2", **as_product
    )
    assert torch.equal(y.float(), 2 * product)
    assert (z == 1).all()

    dy = product.bfloat16()
    dact_kernel[(1, 1)](dy, None, memory, None, rows, width, *dy.stride(), 0, 0, 16, ACTIVATION="none", **block)
    assert torch.equal(y, dy)

    one = torch.ones(1, dtype=dy.dtype, device=target.device)
    dact_kernel[(1, rows)](one, None, None, memory, 16 * rows, width, 0, 0, 0, 0, 16, ACTIVATION="none", **block)
    assert (y == 16).all()
