"""torch's allocators other than the usual one, and calls that break off. Each test starts a process, because torch
chooses its allocator once."""

import importlib.util
import os
import subprocess
import sys

import pytest

from tests import ROOT


def run(*arguments, **variables):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


@pytest.mark.parametrize("settings", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_training_and_captures_work_with_another_allocator(settings):
    files = [f"tests/cuda/test_{name}.py" for name in ("captured_steps", "streams")]
    tests = "(replays and another and global and first) or pinned or outlives or (turns and clips)"
    run(*files, "-k", tests, PYTORCH_ALLOC_CONF=settings)


def test_a_call_that_breaks_off_leaves_nothing_half_done():
    if importlib.util.find_spec("standin_attach") is None:
        pytest.skip("CUDA is the real one, and breaks nothing off")
    run("tests/cuda/broken_off.py", PYTORCH_NO_CUDA_MEMORY_CACHING="1")
