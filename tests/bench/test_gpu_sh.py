"""The script for machines with a GPU, rehearsed: all of it, but for what it says about the device."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import ROOT

SCRIPT = ROOT / "benchmarks" / "gpu.sh"
PARTS = ["build", "test", "sanitize", "step", "linear", "train", "tune"]


@pytest.fixture
def gpu_sh(monkeypatch):
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin")
    return lambda *words: subprocess.run(["bash", SCRIPT, *map(str, words)], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "OUTDIR is missing"),
        (["out", "--part", "sleep"], "there is no part 'sleep'"),
        (["out", "--part"], "there is no part ''"),
        (["out", "--fast"], "there is no option --fast"),
        (["out", "other"], "one OUTDIR, got out and other"),
        (["/proc/nowhere"], "/proc/nowhere can't be written"),
    ],
    ids=lambda it: " ".join(it) if isinstance(it, list) else "",
)
def test_bad_arguments(gpu_sh, words, complaint):
    done = gpu_sh(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert complaint in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_rehearsal(gpu_sh, tmp_path):
    out = tmp_path / "out"
    done = gpu_sh(out, "--rehearse")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[0] for line in (out / "parts.txt").read_text().splitlines()] == PARTS
    files = [*out.iterdir()]
    assert len(files) <= 8
    assert {path.stem for path in files} == {*PARTS, "parts"}
    assert "PASSED tests/" in (out / "test.txt").read_text()
    again = gpu_sh(out, "--rehearse")
    assert again.returncode == 0
    assert again.stdout.count("done before") == len(PARTS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would run")
def test_a_failing_part_is_not_done(gpu_sh, tmp_path):
    """There is no GPU for it."""
    done = gpu_sh(tmp_path, "--part", "sanitize")
    assert done.returncode == 1
    assert (tmp_path / "parts.txt").read_text().startswith("sanitize ended with")


def test_a_rehearsal_differs_at_the_device_boundary_alone():
    settings, _, below = SCRIPT.read_text().partition("# The device boundary")[2].partition("\nfi\n")
    assert "compute-sanitizer" in settings
    for word in ("rehearse", "nvidia-smi", "compute-sanitizer", "cuda-", "*cuda"):
        assert word not in below
