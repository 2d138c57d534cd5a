"""``python -m mpkernels demo``, through the real command."""

import os
import re
import signal
import subprocess
import sys
from functools import partial

import pytest
import torch
from matplotlib.figure import Figure

from mpkernels.bench import steps
from mpkernels.bench.pairs import Samples
from mpkernels.demo import command, picture
from mpkernels.demo.training import (
    FP32,
    OURS,
    OURS_8_BIT,
    OVERFLOWING,
    SIZES,
    WAYS,
    Size,
    Training,
    sources,
)
from tests import commands

pytestmark = [pytest.mark.exhaustive, pytest.mark.begins_first]
COMMAND = [sys.executable, "-m", "mpkernels", "demo"]
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}  # threads that wait for each other take the cores from other tests
CPU = torch.device("cpu")
NOTHING = steps.AfterForward(lambda loss: loss, lambda: None)
TINY = Size(width=16, layers=1, heads=2, context=8, batch=2, lr=1e-3, steps=3)


def demo(*words, out, start=None, status=0):
    if start is None:
        run = commands.run("demo", *words, "--out", out, env=ONE_THREAD)
    else:
        run = subprocess.run(
            [*start, *words, "--out", str(out)], capture_output=True, text=True, check=False, env=ONE_THREAD
        )
    assert run.returncode == status, run.stderr
    assert "Traceback" not in run.stderr
    return run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    return out, demo("--steps", "5", out=out).stdout


def test_it_says_at_the_start_how_many_steps_there_will_be(finished):
    _, output = finished
    assert re.search(r"^5 steps of each follow\.$", output, re.MULTILINE)


def test_it_trains_all_ways_and_draws_them(finished):
    out, output = finished
    (losses,) = re.findall(r"^step 5, held-out losses: (.*)$", output, re.MULTILINE)
    for way in WAYS:
        assert re.search(rf"{way.name} \d\.\d{{3}}(,|$)", losses)
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert f"Drawn: {out}/demo.png\n" in output


def test_it_names_the_injected_overflow(finished):
    assert "In step 4 a grad was given an inf." in finished[1]
    assert re.search(rf"^{OVERFLOWING} +0 +\[768, 192\] +1 +0 +\[5, 7\]", finished[1], re.MULTILINE)


def test_it_says_how_many_bytes_each_way_takes(finished):
    (sizes,) = re.findall(r"^bytes a parameter: (.*)$", finished[1], re.MULTILINE)
    named = zip(WAYS, ("16.0", "8.0", "10.0", "8.0"), strict=True)
    assert sizes == ", ".join(f"{way.name} {size}" for way, size in named)


def test_it_ends_with_a_verdict(finished):
    fast = r"The optimizer's step is (\d+\.\d\d times )?as fast as torch's fused one \(.*\)\."
    last_line = finished[1].splitlines()[-1]
    assert re.fullmatch(rf"{fast}|This machine was busy: .*;.*", last_line)  # which of the two, is tested below


def test_the_picture_points_to_the_step_that_was_skipped():
    panel = Figure().subplots()
    picture._scales(panel, [8.0, 16.0, 8.0, 8.0])
    [note] = panel.texts
    assert note.get_text().startswith("step 3 is skipped:")
    assert note.xy == (3, 8.0)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(SIZES, "cpu", TINY)
    return sources(CPU)


def trained(way, text, steps):
    training = Training(way, text, 30)
    for step in range(steps):
        training.step(step)
    training.evaluate(steps)
    return training


def test_all_ways_begin_alike_and_learn(tiny):
    first = [trained(way, tiny, 1).losses[1] for way in WAYS]
    last = [trained(way, tiny, 30).losses[30] for way in WAYS]
    assert max(first) - min(first) < 1e-2 * first[0]
    assert max(last) < min(first)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_an_overflow_costs_each_way_one_step(tiny, way):
    training = trained(way, tiny, 2)
    before = [param.clone() for param in training.model.parameters()]
    training.step(2, overflows=True)
    assert all(map(torch.equal, before, training.model.parameters()))
    assert training.scales[-1] == training.scales[-2] / 2


def test_a_training_that_takes_long_says_at_which_step_it_is(tiny, monkeypatch, capsys):
    monkeypatch.setattr(command, "SILENCE", 0)
    command.train([Training(OURS, tiny, 30)], 30)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [int(re.match(r"step (\d+)", line)[1]) for line in said] == [*range(1, 31)]


def test_steps_of_the_models_parameters_are_timed_in_turns(monkeypatch):
    made = []
    monkeypatch.setattr(steps, "our_step", lambda params, device, **options: made.append((params, options)) or NOTHING)
    monkeypatch.setattr(steps, "torchs_step", lambda params, *_: made.append((params, {})) or NOTHING)
    samples = command.time_steps(torch.nn.Linear(4, 3), OURS_8_BIT, FP32, seconds=0)
    assert len(samples.ours) == len(samples.theirs) == 6
    (ours, options), (theirs, _) = made
    assert [tuple(it.shape) for it in ours] == [tuple(it.shape) for it in theirs] == [(3, 4), (3,)]
    assert {it.dtype for it in ours} == {torch.bfloat16}
    assert {it.dtype for it in theirs} == {torch.float32}
    assert options == {"state_dtype": torch.int8}


STEADY = Samples([0.01] * 15, [0.03] * 15, 0.0)


def test_the_speed_is_told_by_both_comparisons():
    even = Samples([0.01] * 15, [0.0099, 0.01, 0.0101] * 5, 0.0)
    output = command.verdict(STEADY, even)
    assert output == "The optimizer's step is 3.00 times as fast as torch's fused one (as fast with 8-bit moments)."


@pytest.mark.parametrize("at", [0, 1], ids=["ours", "8-bit"])
@pytest.mark.parametrize(
    ("samples", "why"),
    [
        (STEADY._replace(theirs=[0.02, 0.03, 0.04] * 5), "the 95 % interval of the ratio spans more than 10% of it"),
        (STEADY._replace(waited=0.2), "threads waited for a core more than 5% of the time"),
    ],
    ids=["wide", "busy"],
)
def test_no_speed_is_told_where_the_samples_show_a_busy_machine(samples, why, at):
    pair = [STEADY, STEADY]
    pair[at] = samples
    output = command.verdict(*pair)
    assert output.startswith(f"This machine was busy: {why};")
    assert not re.search(r"\d", output.replace(why, ""))


def test_ctrl_c_ends_it_in_a_line(tmp_path):
    words = [*COMMAND, "--steps", "100000", "--out", str(tmp_path / "new")]
    listens = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a process in a shell's background ignores it
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, **pipes, env=ONE_THREAD, preexec_fn=listens) as run:
        while "steps of each follow" not in run.stdout.readline():
            assert run.poll() is None
        run.send_signal(signal.SIGINT)
        _, wrong = run.communicate(timeout=120)
    assert (run.returncode, wrong) == (130, "mpkernels demo: interrupted\n")
    assert list(tmp_path.iterdir()) == []


def test_without_the_extras_it_runs_and_names_them(tmp_path):
    code = "import sys; sys.modules |= dict.fromkeys(('matplotlib', 'rich')); sys.argv[0] = 'mpkernels'\n"
    code += "from mpkernels.__main__ import main; sys.exit(main())"
    run = demo("--steps", "5", out=tmp_path, start=[sys.executable, "-c", code, "demo"])
    assert "No demo.png will be drawn: matplotlib is not installed (pip install 'mpkernels[demo]')." in run.stdout
    assert list(tmp_path.iterdir()) == []  # a folder that was there stays


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--steps", "0"], "argument --steps: must be at least 1, got 0"),
        (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["--quick"], "unrecognized arguments: --quick"),
    ],
)
def test_bad_arguments_are_refused_in_a_line(words, says, tmp_path):
    output = demo(*words, out=tmp_path, status=2).stderr
    assert output.count("\n") == 1
    assert output.strip().removeprefix("mpkernels demo: ").removeprefix("mpkernels: ") == says


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    assert demo(out=tmp_path / "file" / "in it", status=1).stderr.endswith("in it: Not a directory\n")
    assert demo(out=tmp_path / "file", status=1).stderr.endswith(f"{tmp_path}/file: File exists\n")
    assert (tmp_path / "file").read_text() == "mine"


def test_the_ways_are_what_their_names_say():
    assert FP32.weights == torch.float32
    assert (OURS.moments, OURS_8_BIT.moments) == (torch.bfloat16, torch.int8)
    assert SIZES.keys() == {"cpu", "cuda"}
