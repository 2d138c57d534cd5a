"""The commands as users type them: ``python -m mpkernels bench``, and a checkout's ``python -m benchmarks``."""

import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks import other_libraries, raw_samples
from mpkernels.doctor.machine import describe
from tests import ROOT, commands

pytestmark = pytest.mark.exhaustive

TINY = "unscale_ cpu-1 fp32 1x2^20"
WITHOUT = (
    "import sys; sys.modules.update(dict.fromkeys({modules!r})); from mpkernels.__main__ import main; sys.exit(main())"
)
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


def bench(*words, python=None, **options):
    """Run the command. ``python`` has Python's arguments, if it must be a new process."""
    if python is None:
        return commands.run("bench", *words, **options)
    command = [sys.executable, *python, "bench", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "new.json"
    command = [sys.executable, "-m", "benchmarks", "--only", TINY, "--json", path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done, path


def test_it_measures_and_keeps_raw_samples(measured):
    done, path = measured
    assert re.search(r"unscale_ cpu-1 fp32 1x2\^20-in-cache vs torch .*\d\.\d\d \[\d", done.stdout)
    assert "1 pairs on" in done.stdout
    session = json.loads(path.read_text())
    (pair,) = session["pairs"]
    assert len(pair["ours us"]) == len(pair["torch us"]) >= 6
    assert pair["bytes moved"] == 2 * 4 * 2**20
    assert session["copy GB/s"]["cpu-1"] > 0
    assert {"cpu", "simd", "cores", "torch", "mpkernels", "commit"} <= session["machine"].keys()
    assert done.stderr == "1/1 unscale_ cpu-1 fp32 1x2^20-in-cache vs torch\n"


def test_it_compares_with_an_earlier_run(measured, tmp_path, capsys):
    _, path = measured
    again = tmp_path / "again.json"
    again.write_text(path.read_text())
    assert benchmarks.main(["--only", TINY, "--json", str(again), "--resume", "--compare", str(path)]) == 0
    assert re.search(r"unscale_ .* (\d\.\d\d) -> \1 x torch", capsys.readouterr().out)  # nothing was measured again
    assert again.read_text() == path.read_text()


def refusal(capsys, *words):
    """Return the error of ``python -m benchmarks`` for wrong arguments, before it measures anything."""
    with pytest.raises(SystemExit) as end:
        benchmarks.main([*words])
    said = capsys.readouterr()
    assert (end.value.code, said.out) == (2, "")
    return said.err


def test_a_comparison_with_other_hardware_is_refused(measured, tmp_path, capsys):
    other = json.loads(measured[1].read_text())
    other["machine"]["cpu"] = "Abacus"
    old = tmp_path / "old.json"
    old.write_text(json.dumps(other))
    said = refusal(capsys, "--only", TINY, "--compare", str(old))
    assert "old.json was measured on another machine: cpu Abacus, here" in said


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--only", "nothing like it"], "no case's name has 'nothing like it' in it"),
        (["--fast"], "unrecognized arguments: --fast"),
        (["--compare", "missing.json"], "--compare: missing.json: No such file or directory"),
        (["--compare", "corrupt.json"], "corrupt.json holds no results of this benchmark"),
        (["--compare", "empty.json"], "empty.json holds no results of this benchmark"),
        (["--json", "no/such/new.json"], "--json: no directory no/such"),
        (["--json", "."], "--json: . is no file"),
        (["--json", "/dev/null"], "--json: /dev/null is no file"),
        (["--resume"], "--resume needs --json FILE"),
    ],
    ids=lambda it: " ".join(it) if isinstance(it, list) else "",
)
def test_bad_arguments_are_told_before_anything_is_measured(words, complaint, tmp_path, monkeypatch, capsys):
    (tmp_path / "corrupt.json").write_text('{"date": "2026')
    (tmp_path / "empty.json").write_text("[]")
    monkeypatch.chdir(tmp_path)
    assert complaint in refusal(capsys, *words)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["bench", "--only", "nothing like it"], "no case's name has 'nothing like it' in it; --list shows all"),
        (["bench", "--fast"], "unrecognized arguments: --fast"),
        (["tell"], "invalid choice: 'tell'"),
    ],
    ids=["pattern", "option", "command"],
)
def test_bad_arguments_of_the_command_are_told_in_a_line(words, complaint):
    done = commands.run(*words)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert complaint in done.stderr


def test_a_run_names_the_versions_of_other_libraries(monkeypatch):
    peers = {name: other_libraries.Peer(name, "AdamW", {}) for name in ("pytest.optim", "nowhere.optim")}
    monkeypatch.setattr(other_libraries, "PEERS", peers)
    monkeypatch.setattr(other_libraries, "LIGER", "nowhere")
    assert set(raw_samples.Session().machine.items()) - set(describe().items()) == {("pytest", pytest.__version__)}


def test_a_link_to_the_results_stays_a_link(tmp_path):
    (tmp_path / "link.json").symlink_to("real.json")
    raw_samples.write(tmp_path / "link.json", raw_samples.Session())
    assert (tmp_path / "link.json").is_symlink()
    assert raw_samples.read(tmp_path / "real.json").results == []


def test_quick_measures_a_case_in_turns_without_what_is_optional():
    unhurried = "from mpkernels.bench import command; command.QUICK_SECONDS = 1e9; sys.exit"  # on a busy machine, too
    modules = ["rich", "matplotlib", "pytest", "pytest_benchmark", "triton", "benchmarks"]
    python = WITHOUT.format(modules=modules).replace("sys.exit", unhurried)
    done = bench("--quick", "--only", "unscale_", python=("-c", python))
    assert done.returncode == 0, done.stderr
    assert re.findall(r"turn (\d) of 4: unscale_", done.stderr) == ["1", "2", "3", "4"]
    (line,) = re.findall(r"unscale_ cpu.*", done.stdout)  # all turns together
    is_in_doubt = " wide" in line or " busy" in line
    (found,) = re.findall(r"\n1 pairs on .*: (\d faster, \d even, \d slower.*)\n", done.stdout)
    assert found.endswith("0 faster, 0 even, 0 slower, 1 in doubt") == is_in_doubt


@pytest.mark.parametrize("module", [("mpkernels", "bench"), ("benchmarks", "--json", "new.json")], ids=" ".join)
def test_after_ctrl_c_it_shows_and_keeps_what_it_has(tmp_path, module):
    command = [sys.executable, "-m", *module, "--only", "unscale_ cpu-1", "grad_stats cpu-1"]
    listens = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a process in a shell's background ignores it
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, preexec_fn=listens, cwd=tmp_path, env=environment, **pipes) as process:
        for line in process.stdout:
            if "vs torch" in line:
                break
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "measured so far" in rest
    assert "Traceback" not in errors
    if module[0] == "benchmarks":
        assert json.loads((tmp_path / "new.json").read_text())["pairs"]


def test_the_list_says_what_is_left_out(capsys):
    assert benchmarks.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "vs apex  (left out: apex " in "\n".join(lines)
    names = [line.partition("  (")[0] for line in lines]
    assert len(names) == len(set(names)) > 100
    quick = bench("--list", "--quick").stdout.splitlines()
    assert {name.split()[0] for name in quick} == {"unscale_", "grad_stats", "step", "linear_act", "train"}


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_are_read_as_they_were_written(path, tmp_path):
    session = raw_samples.read(path)
    raw_samples.write(tmp_path / "again.json", session)
    assert raw_samples.read(tmp_path / "again.json") == session


LIST = [sys.executable, "-m", "mpkernels", "bench", "--list"]


def test_a_reader_that_leaves_early_causes_no_message():
    """A pipe to ``head -1`` is closed after a line."""
    with subprocess.Popen(LIST, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        errors = process.stderr.read()
    assert (process.returncode, errors) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux's")
def test_a_full_disk_is_told_in_a_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run(LIST, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "mpkernels bench: No space left on device\n")
