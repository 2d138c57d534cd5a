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
    if target.is_interpreted or (target.device.type == "cpu" and target.kernel != "native"):
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
    """The matrices are the first columns of nine rows that are 2^28 elements long, or of five of 2^29."""
    if target.kernel != "triton":
        pytest.skip("launches Triton's kernels")
    from triton.tools.tensor_descriptor import TensorDescriptor

    from mpkernels.ops.linear.linear_kernel import linear_act_kernel, linear_dact_kernel

    rows, width, tile = 9, 2**28, {"PRECISION": "ieee", "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 16}
    x, weight = (integers(*shape, device=target.device) for shape in ((rows, 16), (32, 16)))
    x_blocks, weight_blocks = (TensorDescriptor.from_tensor(it, [size, 16]) for it, size in ((x, 16), (weight, 64)))
    product = x.float() @ weight.float().t()

    def far(memory):
        return TensorDescriptor(memory, [rows, width], [width, 1], [16, 32])

    y, z = (it.as_strided((rows, 32), (width, 1)) for it in (memory, memory[64:]))
    linear_act_kernel[(1,)](
        x_blocks, weight_blocks, None, None, None, far(memory), far(memory[64:]), None, rows, width, 16,
        ACTIVATION="relu", K_FIRST=False, **tile,
    )  # fmt: skip
    assert torch.equal(y.float(), product.relu())
    assert torch.equal(z.float(), product)

    ones = torch.ones(5 * 16, 64, dtype=x.dtype, device=target.device)
    saved, dy = (TensorDescriptor.from_tensor(ones, [16, columns]) for columns in (32, 64))
    back = {"KNOWS_Y": False, "K_FIRST": False, **tile}
    linear_dact_kernel[(1,)](
        x_blocks, weight_blocks, saved, None, far(memory), None, far(memory[64:]), None, rows, width, 16,
        ACTIVATION="relu2", **back,
    )  # fmt: skip
    assert torch.equal(y.float(), 2 * product)
    assert (z == 1).all()

    sums = memory.as_strided((5, 64), (2**29, 1))
    linear_dact_kernel[(5,)](
        dy, None, None, None, None, None, None, memory, 5 * 16, 2**29, 0, ACTIVATION="none", **back
    )  # fmt: skip
    assert (sums == 16).all()
