"""The examples run unchanged, and show what they claim."""

import ast
import os
import re
import runpy
import subprocess
import sys

import pytest
import torch

from tests import ROOT

EXAMPLES = ROOT / "examples"
NEEDS = {
    "diffusers_dit": ["diffusers", "transformers"],
    "huggingface_trainer": ["transformers", "accelerate"],
    "huggingface_trl": ["trl"],
    "fuse_gpt2": ["transformers"],
}
HAS_CHUNKED_LOSS = hasattr(torch.nn, "LinearCrossEntropyOptions")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def both_ranks_end_alike(text):
    """Lines of two processes may mix."""
    sums = dict(re.findall(r"rank (\d): [^\n]*?the weights add up to (-?\d+\.\d+)", text))
    assert sums.keys() == {"0", "1"}
    assert sums["0"] == sums["1"]


def both_ranks_skip_once(text):
    both_ranks_end_alike(text)
    assert text.count("1 step skipped, scale 512, ") == 2  # it began with 1024


def masters_are_on_the_host(text):
    losses = [float(it) for it in re.findall(r"loss ([\d.]+)", text)]
    assert len(losses) == 3
    assert losses[-1] < 2.6  # it begins near log(256)
    assert "grads: 0 bytes" in text
    assert re.search(r"masters and moments: [\d,]+ bytes on cpu$", text, re.MULTILINE)


def bf16_weights_have_remainders(text):
    assert re.search(r"torch.bfloat16.*: step, exp_avg, exp_avg_sq, remainder$", text, re.MULTILINE)


def automodel_builds_ours_by_its_name(text):
    assert float(re.findall(r"loss ([\d.]+)", text)[-1]) < 2  # of 32, the variance of what it learns
    bf16_weights_have_remainders(text)


def torchtitan_saves_remainders_by_name(text):
    assert float(re.search(r"-> ([\d.]+)$", text, re.MULTILINE)[1]) < 2  # of 32, likewise
    assert "state.0.weight.remainder" in text


def masters_learn_as_fp32_weights_and_random_rounding_as_adafactor(text):
    found = re.findall(r"([\d.]+) bytes a parameter  loss ([\d.]+)$", text, re.MULTILINE)
    (sizes, losses) = zip(*((float(size), float(loss)) for size, loss in found), strict=True)
    assert sizes[:4] == pytest.approx((16, 8, 6 + 1 / 32, sizes[4] + 6), abs=0.02)
    assert 2 < sizes[4] < 2.5  # such small matrices have large sums of rows and columns
    fp32, alone, ours, adafactor, rounded = losses
    assert abs(ours - fp32) < 0.02 * fp32
    assert abs(rounded - adafactor) < 0.02 * adafactor
    assert alone > 1.1 * fp32


SHOWS = {
    "diffusers_dit": masters_learn_as_fp32_weights_and_random_rounding_as_adafactor,
    "ddp": both_ranks_end_alike,
    "fsdp2_fp16": both_ranks_skip_once,
    "huggingface_trl": bf16_weights_have_remainders,
    "nemo_automodel_config": automodel_builds_ours_by_its_name,
    "offload": masters_are_on_the_host,
    "torchtitan_container": torchtitan_saves_remainders_by_name,
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_runs(path):
    for library in NEEDS.get(path.stem, []):
        pytest.importorskip(library, reason="needs the extra integrations")
    if path.stem == "linear_cross_entropy" and not HAS_CHUNKED_LOSS:
        pytest.skip("needs torch 2.13")
    launcher = TORCHRUN if "torchrun" in path.read_text() else []
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # the models are small, and the cores shared
    command = [sys.executable, *launcher, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env=one_thread)
    assert done.returncode == 0, done.stderr
    if shows := SHOWS.get(path.stem):
        shows(done.stdout)


def results_of(name):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]()


def test_58_batches_in_fours_are_15_steps():
    steps, loss = results_of("gradient_accumulation")
    assert steps == 15
    assert loss < 4.5  # it begins near log(256)


def test_the_schedule_moves_on_steps_alone():
    example = runpy.run_path(str(EXAMPLES / "scheduler_on_skips.py"))
    skipped, moved = example["main"]()
    assert skipped > 0
    late = 0 if example["DEVICE"] == "cpu" else 3  # a GPU's outcomes may come late, or be read by several steps
    assert abs(moved - (40 - skipped)) <= late


def test_fp16_weights_train_in_14_bytes_a_parameter_where_torchs_scaler_refuses_their_grads(capsys):
    results = results_of("t4_fp16")
    assert "Attempting to unscale FP16 gradients" in capsys.readouterr().out
    losses, skips, sizes = zip(*results.values(), strict=True)
    assert max(losses) < 0.05  # of 8, the variance of what they learn
    assert skips[0] == 0
    assert min(skips[1:]) > 0
    assert [round(size) for size in sizes] == [16, 14, 8]


def test_muon_with_masters_learns_as_with_fp32_weights_and_better_than_with_bf16_ones():
    losses = results_of("muon_bf16")
    assert abs(losses["bf16, masters"] - losses["fp32"]) < 0.02
    assert losses["bf16"] - losses["fp32"] > 0.05


@pytest.mark.skipif(not HAS_CHUNKED_LOSS, reason="needs torch 2.13")
def test_a_chunked_loss_and_fused_mlps_save_memory_together():
    results = results_of("linear_cross_entropy")
    losses, kept = ({way: result[place] for way, result in results.items()} for place in (0, 1))
    assert max(losses.values()) - min(losses.values()) < 1e-4
    chunked = kept[False, False] - kept[False, True]
    fused = kept[False, False] - kept[True, False]
    assert min(chunked, fused) > 2**20
    assert kept[False, False] - kept[True, True] == chunked + fused


def last_loss(path):
    run = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=True)
    assert run.stderr == ""
    return [float(loss) for loss in re.findall(r"loss (\S+),", run.stdout)][-1]


def without_imports(path):
    docstring, *body = ast.parse(path.read_text()).body
    assert isinstance(docstring, ast.Expr)
    return [ast.unparse(node) for node in body if not isinstance(node, ast.Import | ast.ImportFrom)]


def test_quickstart_learns_in_twenty_lines():
    path = EXAMPLES / "quickstart.py"
    assert len([line for line in path.read_text().splitlines()[1:] if line.strip()]) <= 20
    assert last_loss(path) < 0.5  # of 8, the variance of what it learns


@pytest.mark.exhaustive
def test_before_and_after_differ_in_imports_alone_and_learn_the_same():
    before, after = EXAMPLES / "before_after" / "before.py", EXAMPLES / "before_after" / "after.py"
    assert without_imports(before) == without_imports(after)
    losses = last_loss(before), last_loss(after)
    assert abs(losses[0] - losses[1]) < 0.1 * losses[0]
