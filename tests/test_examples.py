"""The examples run as they stand, and show what they say."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_runs(path):
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_schedule_moves_on_steps_alone():
    example = runpy.run_path(str(EXAMPLES / "scheduler_on_skips.py"))
    skipped, moved = example["main"]()
    assert skipped > 0
    late = (
        0 if example["DEVICE"] == "cpu" else 3
    )  # answers that were on their way, or the newest for more than one step
    assert abs(moved - (40 - skipped)) <= late
