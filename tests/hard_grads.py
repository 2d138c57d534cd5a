"""Lists of grads that careless kernels get wrong."""

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

# Sizes around each vector, block, page and chunk at which some kernel cuts.
SIZES = (0, 1, 2, 7, 15, 31, 32, 33, 255, 1023, 1024, 1025, 8191, 8193, 16383, 16385, 32769, 40000)


def random_grads(dtypes=DTYPES, sizes=SIZES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes for dtype in dtypes]


def odd_layouts(dtype=torch.float32, seed=0):
    """Return grads that are transposed, channels-last, sliced, misaligned, with a gap, 0-dim, and empty in between."""
    base = torch.randn(6, 4, 8, 10, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    return [
        base[0, 0].t(),
        base.contiguous(memory_format=torch.channels_last),
        base[:, 1, 2:5, ::3],
        base.flatten()[1:1500],
        base.flatten()[3:1027],
        base[1, 1, :, 2],
        base[2, 2, 3, 4],
        base[:, 2:2],
        base.flatten()[1::2],
    ]


def every_place(dtype=torch.float32, seed=0):
    """Return views that begin at each element of two 16-byte words, some shorter than a word and some longer than a
    CUDA block's round."""
    base = torch.randn(20_000, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    return [base[offset:][:size] for offset in range(16) for size in (0, 1, 5, 15, 16, 17, 33, 8191, 8209)]


def clones(grads, device="cpu"):
    """Return copies with the same strides, gaps included, and the same place within 16 bytes."""
    copies = []
    for grad in grads:
        span = 1 + sum((size - 1) * stride for size, stride in zip(grad.shape, grad.stride(), strict=True) if size > 0)
        offset = grad.storage_offset() % 8
        storage = torch.zeros(offset + max(span, 1), dtype=grad.dtype, device=device)
        copies.append(storage.as_strided(grad.shape, grad.stride(), offset).copy_(grad))
    return copies


def same_bits(a, b):
    """Return whether all bits are equal. -0.0 differs from 0.0, but all NaN count as equal."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    both_nan = a.isnan() & b.isnan()
    return bool(((a == b) & (a.signbit() == b.signbit()) | both_nan).all())
