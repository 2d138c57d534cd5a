"""More than 2^31 elements: an index that is 32 bits wide anywhere would wrap."""

import numpy as np
import pytest
import torch

from mpkernels.ops import grad_stats, unscale_

SIZE = 2**31 + 11


def zeros(device):
    if device.type == "cuda":
        return torch.zeros(SIZE, dtype=torch.bfloat16, device=device)
    return torch.from_numpy(np.zeros(SIZE, dtype=np.int16)).view(torch.bfloat16)  # pages come when they are written


def test_the_last_element_counts(target):
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
    from mpkernels.ops import _table, unscale_triton

    skipped_chunks = SIZE // _table.CHUNK
    skipped = skipped_chunks * _table.CHUNK
    device = "cuda" if torch.cuda.is_available() else "cpu"  # where Triton runs compiled, or interpreted
    grads = torch.full((37,), 8.0, device=device)
    row = [grads.data_ptr() - 4 * skipped, skipped + 37, -skipped_chunks, 0]
    words = torch.tensor([*row, 0], dtype=torch.int64, device=device)
    found_inf, inv_scale = torch.zeros((), device=device), torch.full((), 0.5, device=device)
    unscale_triton.unscale_kernel[(1,)](words, 1, found_inf, inv_scale, CHUNK=_table.CHUNK)
    assert grads.tolist() == [4.0] * 37
