"""``python -m mpkernels demo``, through the real command."""

import os
import re
import signal
import subprocess
import sys
from functools import partial

import pytest
import torch

from mpkernels.bench import steps
from mpkernels.bench.pairs import Samples
from mpkernels.demo import command
from mpkernels.demo.corpus import Corpus
from mpkernels.demo.model import SIZES, Size
from mpkernels.demo.training import BF16, FP32, OURS, OURS_8_BIT, OVERFLOWING, WAYS, Training, time_steps
from tests import commands

pytestmark = pytest.mark.begins_first
COMMAND = [sys.executable, "-m", "mpkernels", "demo"]
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}  # threads that wait for each other take the cores from other tests
CPU = torch.device("cpu")
NOTHING = steps.AfterForward(lambda loss: loss, lambda: None)
TINY = Size(width=16, layers=1, heads=2, context=8, batch=2, lr=1e-3)


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
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    return out, demo("--steps", "5", out=out).stdout


def test_it_says_at_the_start_how_many_steps_there_will_be(whole):
    _, said = whole
    assert re.search(r"^5 steps of each follow\.$", said, re.MULTILINE)


def test_it_trains_all_ways_and_draws_them(whole):
    out, said = whole
    (losses,) = re.findall(r"^step 5, held-out losses: (.*)$", said, re.MULTILINE)
    for way in WAYS:
        assert re.search(rf"{way.name} \d\.\d{{3}}(,|$)", losses)
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert f"Drawn: {out}/demo.png\n" in said


def test_it_names_the_injected_overflow(whole):
    assert "In step 4 a grad was given an inf." in whole[1]
    assert re.search(rf"^{OVERFLOWING} +0 +\[768, 192\] +1 +0 +\[5, 7\]", whole[1], re.MULTILINE)


def test_it_ends_with_a_verdict(whole):
    said = whole[1]
    fast = r"The optimizer's step is ((at least |at most )?\d+\.\d\d times )?as fast as torch's fused one \(.*\):$"
    busy = (
        r"How fast .* can't be told: other programs were at work, and\nthreads waited for a core (\d+)% of the time\.$"
    )
    told = re.search(rf"^1\. (?:{fast}|{busy})", said, re.MULTILINE)
    assert told
    assert told[3] is None or int(told[3]) >= 5  # what a quiet machine must say is tested below
    assert re.search(
        r"^2\. Weights, grads and states take 0\.63 of torch\.amp's bytes \(0\.50 with", said, re.MULTILINE
    )
    assert re.search(r"^3\. The held-out loss is \d\.\d{3} ", said, re.MULTILINE)


@pytest.mark.parametrize(("seconds", "steps"), [(1e9, command.STEPS), (0.0, command.FEWEST)])
def test_the_number_of_steps_follows_from_the_first_ones(monkeypatch, seconds, steps):
    monkeypatch.setattr(command, "ENOUGH", seconds)
    monkeypatch.setitem(SIZES, "cpu", TINY)
    assert command.count_steps(CPU, Corpus(CPU)) == steps


def trained(way, steps):
    corpus, it = Corpus(CPU), Training(way, TINY, CPU, 30)
    for step in range(steps):
        it.step(*corpus.batch(step, TINY.batch, TINY.context))
    it.evaluate(steps, [corpus.batch(0, TINY.batch, TINY.context, held_out=True)])
    return it


def test_all_begin_alike_and_learn():
    first = [trained(way, 1).held_out[0][1] for way in WAYS]
    last = [trained(way, 30).held_out[0][1] for way in WAYS]
    assert max(first) - min(first) < 1e-2 * first[0]
    assert max(last) < min(first)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_an_overflow_costs_each_way_one_step(way):
    it = trained(way, 2)
    before = [param.clone() for param in it.model.parameters()]
    it.step(*Corpus(CPU).batch(2, TINY.batch, TINY.context), overflows=True)
    assert all(map(torch.equal, before, it.model.parameters()))
    assert it.scales[-1] == (it.scales[-2] / 2 if way.has_scaler else 1)


def test_steps_of_the_models_parameters_are_timed_in_turns(monkeypatch):
    made = []
    monkeypatch.setattr(steps, "our_step", lambda params, device, **options: made.append((params, options)) or NOTHING)
    monkeypatch.setattr(steps, "torchs_step", lambda params, *_: made.append((params, {})) or NOTHING)
    samples = time_steps([(3, 4), (5,)], OURS_8_BIT, CPU, seconds=0)
    assert len(samples.ours) == len(samples.theirs) == 6
    (ours, options), (theirs, _) = made
    assert [tuple(it.shape) for it in ours] == [tuple(it.shape) for it in theirs] == [(3, 4), (5,)]
    assert {it.dtype for it in ours} == {torch.bfloat16}
    assert {it.dtype for it in theirs} == {torch.float32}
    assert options == {"state_dtype": torch.int8}


def timed(ours, torchs, waited=0.0):
    return [Samples(ours, torchs, waited)] * 2


def test_the_speed_is_told_with_the_doubts_about_its_samples():
    steady, wide = [0.01] * 15, [0.02, 0.03, 0.04] * 5
    assert "step is 3.00 times as fast as torch's fused one (3.00 with" in command.speed(*timed(steady, [0.03] * 15))
    said = command.speed(*timed(steady, wide))
    assert "step is at least 2.00 times as fast" in said
    assert "The samples are wide." in said
    assert "step is as fast as torch's fused one (as fast with" in command.speed(*timed(steady, steady))


def test_no_speed_is_told_where_other_programs_were_at_work():
    said = command.speed(*timed([0.01] * 15, [0.1591] * 15, waited=0.2))
    assert said.endswith("can't be told: other programs were at work, and\nthreads waited for a core 20% of the time.")
    assert "15" not in said


@pytest.mark.exhaustive
def test_ctrl_c_ends_it_in_a_line(tmp_path):
    words = [*COMMAND, "--steps", "100000", "--out", str(tmp_path)]
    listens = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # what a shell has put in the background ignores it
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, **pipes, env=ONE_THREAD, preexec_fn=listens) as run:
        while "steps of each follow" not in run.stdout.readline():
            assert run.poll() is None
        run.send_signal(signal.SIGINT)
        _, wrong = run.communicate(timeout=120)
    assert (run.returncode, wrong) == (130, "mpkernels demo: interrupted, nothing was drawn\n")


@pytest.mark.exhaustive
def test_without_the_extras_it_runs_and_names_them(tmp_path):
    code = "import sys; sys.modules |= dict.fromkeys(('matplotlib', 'rich')); sys.argv[0] = 'mpkernels'\n"
    code += "from mpkernels.__main__ import main; sys.exit(main())"
    run = demo("--steps", "5", out=tmp_path, start=[sys.executable, "-c", code, "demo"])
    assert "No demo.png: matplotlib is not installed (pip install 'mpkernels[demo]')." in run.stdout
    assert not (tmp_path / "demo.png").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--steps", "3"], "argument --steps: must be a whole number from 4 on, got '3'"),
        (["--steps", "many"], "argument --steps: must be a whole number from 4 on, got 'many'"),
        (["--quick"], "unrecognized arguments: --quick"),
    ],
)
def test_bad_words(words, says, tmp_path):
    said = demo(*words, out=tmp_path, status=2).stderr
    assert said.count("\n") == 1
    assert said.strip().removeprefix("mpkernels demo: ").removeprefix("mpkernels: ") == says


def test_a_place_that_is_none(tmp_path):
    (tmp_path / "file").write_text("mine")
    assert demo(out=tmp_path / "file" / "in it", status=2).stderr.endswith(": Not a directory\n")
    assert demo(out=tmp_path / "file", status=2).stderr.endswith(f"{tmp_path}/file: File exists\n")
    assert (tmp_path / "file").read_text() == "mine"


def test_the_ways_are_what_their_names_say():
    assert FP32.weights == torch.float32
    assert not BF16.has_scaler
    assert (OURS.moments, OURS_8_BIT.moments) == (torch.bfloat16, torch.int8)
    assert SIZES.keys() == {"cpu", "cuda"}
