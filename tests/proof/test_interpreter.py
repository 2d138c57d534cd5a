"""Changes to Triton's interpreter that tests of kernels would not notice."""

from unittest import mock

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU")


@triton.jit
def twice(x):
    return x + tl.sum(x, 0)


@triton.jit
def add_up(x, calls: tl.constexpr):
    total = tl.load(x + tl.arange(0, 2))
    for _ in range(calls):
        total = twice(total)
    tl.store(x + tl.arange(0, 2), total)


@pytest.mark.parametrize("calls", [1, 20])
def test_the_language_is_patched_once_a_launch_and_then_restored(calls):
    """Calls of device functions patch nothing, but Triton's own device functions see the patched language, too."""
    x, load = torch.tensor([1.0, -1.0]), tl.load
    with mock.patch.object(interpreter, "_patch_lang_core", wraps=interpreter._patch_lang_core) as patches:
        add_up[(1,)](x, calls)
    assert patches.call_count <= 3  # tl for the launch; tl and tl.core for tl.sum
    assert x.tolist() == [1.0, -1.0]
    assert tl.load is load


def test_a_blocks_type_is_described_once():
    """The interpreter asks for it with each number. A remembered type equals the one that Triton makes."""
    x = torch.tensor([1.0, -1.0])
    with mock.patch.object(tl.core, "validate_block_shape", wraps=tl.core.validate_block_shape) as described:
        for _ in range(2):
            add_up[(1,)](x, 20)
    assert described.call_count <= 5  # floats, integers, bools, pointers
    pointers = [tl.block_type(tl.pointer_type(tl.int8, space), [4]) for space in (1, 2, 1)]
    assert [it.element_ty.address_space for it in pointers] == [1, 2, 1]
    block = tl.block_type(tl.float32, [tl.constexpr(4), 2])
    assert ([*block.shape], block.numel, block.element_ty) == ([4, 2], 8, tl.float32)
    assert tl.block_type(tl.int32, [4, 2]) != block == tl.block_type(tl.float32, [4, 2])
