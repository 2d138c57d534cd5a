"""The examples run as they stand, and show what they say."""

import os
import re
import runpy
import subprocess
import sys

import pytest

from tests import ROOT

EXAMPLES = ROOT / "examples"
NEEDS = {"huggingface_trainer": ["transformers", "accelerate"], "fuse_gpt2": ["transformers"]}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_runs(path):
    for library in NEEDS.get(path.stem, []):
        pytest.importorskip(library, reason="needs the extra integrations")
    launcher = TORCHRUN if "torchrun" in path.read_text() else []
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # the models are small, and the cores shared
    command = [sys.executable, *launcher, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env=one_thread)
    assert done.returncode == 0, done.stderr
    if path.stem == "ddp":
        sums = re.findall(r"rank (.): the weights add up to (-?[\d.]+(?:e[-+]\d+)?)", done.stdout)
        assert dict(sums).keys() == {"0", "1"}
        assert len({total for _, total in sums}) == 1
    if path.stem == "offload":
        losses = [float(it) for it in re.findall(r"loss ([\d.]+)", done.stdout)]
        assert losses == sorted(losses, reverse=True)
        assert losses[-1] < 2.6  # it begins near log(256)
        assert "grads: 0 bytes" in done.stdout
        assert re.search(r"masters and moments: [\d,]+ bytes on cpu$", done.stdout, re.MULTILINE)


def test_58_batches_in_fours_are_15_steps():
    example = runpy.run_path(str(EXAMPLES / "gradient_accumulation.py"))
    steps, loss = example["main"]()
    assert steps == 15
    assert loss < 4.5  # it begins near log(256)


def test_the_schedule_moves_on_steps_alone():
    example = runpy.run_path(str(EXAMPLES / "scheduler_on_skips.py"))
    skipped, moved = example["main"]()
    assert skipped > 0
    late = (
        0 if example["DEVICE"] == "cpu" else 3
    )  # answers that were on their way, or the newest for more than one step
    assert abs(moved - (40 - skipped)) <= late
