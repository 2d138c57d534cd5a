"""The interpreter's mends, where the tests of kernels would not notice."""

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
    """Not at each call of a device function; but what triton's own device functions see, too."""
    x, load = torch.tensor([1.0, -1.0]), tl.load
    with mock.patch.object(interpreter, "_patch_lang_core", wraps=interpreter._patch_lang_core) as patches:
        add_up[(1,)](x, calls)
    assert patches.call_count <= 3  # tl for the launch; tl and tl.core for tl.sum
    assert x.tolist() == [1.0, -1.0]
    assert tl.load is load
