"""torch's allocators other than the usual one, and memory that runs out. Each has a process of its own: torch asks which
allocator to use once."""

import ctypes
import os
import subprocess
import sys

import pytest

from tests import ROOT
from tests.cuda import out_of_memory
from tests.cuda.training import CUDA, Loop, assert_alike


def run(module, *arguments, **variables):
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("settings", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_training(settings):
    assert "captured and replayed" in run("tests.cuda.test_allocators", PYTORCH_ALLOC_CONF=settings)


@pytest.mark.parametrize("call", out_of_memory.CALLS)
def test_memory_that_runs_out_leaves_nothing_half_done(call):
    if not hasattr(ctypes.CDLL("libcudart.so.13"), "standin_allocations_to_failure"):
        pytest.skip("CUDA is the real one, and counts no allocations")
    assert "allocations" in run("tests.cuda.out_of_memory", call, PYTORCH_NO_CUDA_MEMORY_CACHING="1")


def main():
    import torch

    from tests.cuda.test_captured_steps import captured
    from tests.cuda.training import batch

    for way in ({"max_norm": 0.5}, {"unscales": True, "clips": True}):
        assert_alike(Loop(CUDA, **way).run().results(), Loop("cpu", **way).run().results())
    loop, x = Loop(CUDA, max_norm=1.0), batch(0, CUDA)
    loop.step(x)
    graph = captured(lambda: loop.step(x))
    del loop.metrics
    big = [torch.ones(1 << 20, device=CUDA) for _ in range(20)]
    del big
    torch.cuda.empty_cache()
    graph.replay()
    assert all(torch.isfinite(param).all() for param in loop.layers.parameters())
    print("captured and replayed")


if __name__ == "__main__":
    main()
