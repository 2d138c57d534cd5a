"""``python -m mpkernels demo``, through the real command."""

import os
import pickle
import re
import signal
import subprocess
import sys

import pytest
import torch
from torch.utils._pytree import tree_leaves

from mpkernels.demo import report
from mpkernels.demo.corpus import Corpus
from mpkernels.demo.model import SIZES, Size
from mpkernels.demo.training import NAMES, SIDES, Training
from tests import commands

COMMAND = [sys.executable, "-m", "mpkernels", "demo"]
STEPS = ["--steps", "2"]
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}  # threads that wait for each other take the cores from other tests


def demo(*words, out, start=None, status=0):
    if start is None:
        run = commands.run("demo", *words, "--out", out, env=ONE_THREAD)
    else:
        command = [*start, *words, "--out", str(out)]
        run = subprocess.run(command, capture_output=True, text=True, check=False, env=ONE_THREAD)
    assert run.returncode == status, run.stderr
    assert "Traceback" not in run.stderr
    return run


def refused(*words, out, status=2, start=None):
    """The one line that is said."""
    run = demo(*words, out=out, start=start, status=status)
    assert run.stderr.count("\n") == 1
    return run.stderr.strip().removeprefix("mpkernels demo: ")


def state(out):
    return torch.load(out / "demo.pt", weights_only=True)


def without_times(saved):
    return {side: {key: value for key, value in saved[side].items() if key != "seconds"} for side in SIDES}


def same(a, b):
    pairs = zip(tree_leaves(a), tree_leaves(b), strict=True)
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run."""
    out = tmp_path_factory.mktemp("demo")
    return out, demo("--steps", "3", out=out).stdout


def test_it_trains_both_shows_them_and_writes(whole):
    out, said = whole
    for side in SIDES:
        assert re.search(rf"^ *{side} +3 +\d\.\d{{4}} ", said, re.MULTILINE)
    assert said.count("loss scale") == 2  # above the lines, and in the table
    assert re.search(r" (fp32|bf16|fp16), on \S", said)
    assert "held-out loss" in said
    assert said.partition("writes after 'def ':")[2].strip().startswith("def ")
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert list(out.glob(".*")) == []


def test_both_begin_alike_and_learn(whole):
    theirs, ours = (state(whole[0])[side]["losses"] for side in SIDES)
    assert abs(theirs[0] - ours[0]) < 1e-2 * theirs[0]
    assert theirs[-1] < theirs[0]
    assert ours[-1] < ours[0]


def test_resumed_is_uninterrupted_to_the_last_bit(whole, tmp_path):
    demo("--steps", "2", out=tmp_path)
    demo("--steps", "3", "--resume", out=tmp_path)
    assert same(without_times(state(tmp_path)), without_times(state(whole[0])))


TINY = Size(width=16, layers=1, heads=2, context=8, batch=2, lr=1e-3)


@pytest.mark.parametrize("side", SIDES)
def test_resumed_is_uninterrupted_with_a_loss_scale_too(side):
    def training():
        it = Training(side, TINY, "fp16", torch.device("cpu"), seed=0)
        it.scaler = it.names.GradScaler("cpu", init_scale=2.0**40, growth_interval=2)  # overflows, backs off and grows
        return it

    corpus = Corpus(torch.device("cpu"), seed=0)
    batches = [corpus.batch(step, TINY.batch, TINY.context) for step in range(30)]
    whole, first, second = training(), training(), training()
    whole.train(batches)
    first.train(batches[:20])
    second.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    second.train(batches[20:])
    parts = [
        {key: it.state_dict()[key] for key in ("model", "optimizer", "scaler", "losses")} for it in (whole, second)
    ]
    assert same(*parts)
    assert 0 < whole.skipped_steps == second.skipped_steps < 30
    assert report.row(whole)[5:7] == (f"{whole.scaler.get_scale():.0f}", str(whole.skipped_steps))


def test_ctrl_c_leaves_a_checkpoint_and_a_summary(tmp_path):
    words = [*COMMAND, "--steps", "100000", "--precision", "fp32", "--out", str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ONE_THREAD) as run:
        while not run.stdout.readline().startswith("mpkernels"):
            assert run.poll() is None
        run.send_signal(signal.SIGINT)
        said, wrong = run.communicate()
    assert (run.returncode, wrong) == (130, "")
    done = len(state(tmp_path)["mpkernels"]["losses"])
    assert f"Stopped after {done} of 100000 steps" in said
    assert "held-out loss" in said
    assert f"python -m mpkernels demo --resume --out {tmp_path}" in said
    said = demo("--resume", "--steps", str(done + 1), out=tmp_path).stdout
    assert re.search(rf"^ *mpkernels +{done + 1} ", said, re.MULTILINE)


def test_without_the_extras_it_runs_and_names_them(tmp_path):
    code = "import sys; sys.modules |= dict.fromkeys(('matplotlib', 'rich')); sys.argv[0] = 'mpkernels'\n"
    code += "from mpkernels.__main__ import main; sys.exit(main())"
    run = demo(*STEPS, "--precision", "fp32", out=tmp_path, start=[sys.executable, "-c", code, "demo"])
    assert "No demo.png: matplotlib is not installed (pip install 'mpkernels[demo]')." in run.stdout
    assert "No live table: rich is not installed (pip install 'mpkernels[demo]')." in run.stdout
    assert not (tmp_path / "demo.png").exists()


def test_a_slow_machine_takes_no_longer(tmp_path):
    code = "import sys; from mpkernels.demo import command; command.ENOUGH = 0.0; sys.argv[0] = 'mpkernels'\n"
    code += "from mpkernels.__main__ import main; sys.exit(main())"
    run = demo("--precision", "fp32", out=tmp_path, start=[sys.executable, "-c", code, "demo"])
    assert "writes after 'def '" in run.stdout
    assert len(state(tmp_path)["mpkernels"]["losses"]) == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--precision", "int4"], "argument --precision: invalid choice: 'int4' (choose from 'fp32', 'bf16', 'fp16')"),
        (["--steps", "0"], "argument --steps: must be a whole number above 0, got '0'"),
        (["--steps", "many"], "argument --steps: must be a whole number above 0, got 'many'"),
        (["--resume"], "--resume: there is no checkpoint at {out}/demo.pt"),
        (["--quick"], "unrecognized arguments: --quick"),
    ],
)
def test_bad_words(words, says, tmp_path):
    said = refused(*words, out=tmp_path).removeprefix("mpkernels: ")
    assert said.replace("fp32, bf16, fp16", "'fp32', 'bf16', 'fp16'") == says.format(out=tmp_path)


def test_a_place_that_is_none(tmp_path):
    (tmp_path / "file").write_text("mine")
    assert refused(*STEPS, out=tmp_path / "file" / "in it").endswith(": Not a directory")
    assert refused(*STEPS, out=tmp_path / "file") == f"{tmp_path}/file: File exists"
    assert (tmp_path / "file").read_text() == "mine"


def foreign(path):
    torch.save({"model": torch.ones(3)}, path)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1000])


def damage(path):
    saved = torch.load(path, weights_only=True)
    del saved["mpkernels"]["model"]["head.bias"]
    torch.save(saved, path)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda path: path.write_text("a letter"), "can't be read as a checkpoint"),
        (cut, "can't be read as a checkpoint"),
        (foreign, "is not a checkpoint of this demo"),
        (damage, "is damaged"),
    ],
    ids=["text", "cut", "foreign", "damaged"],
)
def test_a_checkpoint_that_is_none(whole, tmp_path, spoil, says):
    path = tmp_path / "demo.pt"
    path.write_bytes((whole[0] / "demo.pt").read_bytes())
    spoil(path)
    before = path.read_bytes()
    assert refused("--resume", out=tmp_path) == f"--resume: {path} {says}"
    assert path.read_bytes() == before


def test_a_checkpoint_of_another_run(whole):
    another = "fp32" if state(whole[0])["precision"] != "fp32" else "bf16"
    said = refused("--resume", "--precision", another, out=whole[0])
    assert said == f"--resume: {whole[0]}/demo.pt is of a run with another precision"


LIMITED = ["bash", "-c", 'ulimit -f {kib}; exec "$0" "$@"', *COMMAND]


def limited(kib):
    return [word.format(kib=kib) for word in LIMITED]


def test_no_room_at_the_start(tmp_path):
    (tmp_path / "demo.pt").write_text("of an earlier run")
    assert refused(*STEPS, out=tmp_path, start=limited(100)) == f"{tmp_path}/demo.pt: File too large"
    assert [path.name for path in tmp_path.iterdir()] == ["demo.pt"]
    assert (tmp_path / "demo.pt").read_text() == "of an earlier run"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the limit is for a CPU's size of model")
def test_no_room_on_the_way(tmp_path):
    """The first checkpoint has no moments yet, so it still fits."""
    assert refused(*STEPS, out=tmp_path, start=limited(9000), status=1) == f"{tmp_path}/demo.pt: File too large"
    demo("--resume", "--steps", "1", out=tmp_path)


def test_what_an_earlier_run_has_left_is_set_aside(tmp_path):
    (tmp_path / "demo.pt").write_text("of an earlier run")
    demo("--steps", "1", "--precision", "fp32", out=tmp_path)
    assert (tmp_path / "demo.previous.pt").read_text() == "of an earlier run"


def test_sides_and_sizes_are_whole():
    assert all(len(both) == len(SIDES) for both in NAMES.values())
    assert SIZES.keys() == {"cpu", "cuda"}
