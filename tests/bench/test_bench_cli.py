"""The command, as it is typed."""

import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from mpkernels.bench import results
from tests import ROOT, commands

TINY = "unscale_ cpu-1 fp32 1x2^20"
WITHOUT = (
    "import sys; sys.modules.update(dict.fromkeys({modules!r})); from mpkernels.__main__ import main; sys.exit(main())"
)
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


def bench(*words, python=None, **options):
    """python: its own words, where it must be one of its own."""
    if python is None:
        return commands.run("bench", *words, **options)
    command = [sys.executable, *python, "bench", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    files = folder / "new.json", folder / "new.png"
    done = bench("--only", TINY, "--json", files[0], "--plot", files[1])
    assert done.returncode == 0, done.stderr
    return done, *files


def test_it_measures_and_keeps_raw_samples(measured):
    done, path, plot = measured
    assert re.search(r"unscale_ cpu-1 fp32 1x2\^20-in-cache vs torch .*\d\.\d\d \[\d", done.stdout)
    assert "1 pairs on" in done.stdout
    raw = json.loads(path.read_text())
    (pair,) = raw["pairs"]
    assert len(pair["ours us"]) == len(pair["torch us"]) >= 6
    assert pair["bytes moved"] == 2 * 4 * 2**20
    assert raw["copy GB/s"]["cpu-1"] > 0
    assert {"cpu", "simd", "cores", "torch", "mpkernels", "commit"} <= raw["machine"].keys()
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert done.stderr == ""


def test_it_compares_with_an_earlier_run(measured, tmp_path):
    _, path, _ = measured
    assert len(path.read_text()) > 0
    again = tmp_path / "again.json"
    again.write_text(path.read_text())
    done = bench("--only", TINY, "--json", again, "--resume", "--compare", path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"unscale_ .* (\d\.\d\d) -> \1 x torch", done.stdout)  # nothing was measured again
    assert again.read_text() == path.read_text()


def test_it_refuses_other_hardware(measured, tmp_path):
    other = json.loads(measured[1].read_text())
    other["machine"]["cpu"] = "Abacus"
    old = tmp_path / "old.json"
    old.write_text(json.dumps(other))
    done = bench("--only", TINY, "--compare", old)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "old.json was measured on another machine: cpu Abacus, here" in done.stderr


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
        (["--plot", "out.bmp"], "--plot: out.bmp must end in .png, .svg, .pdf"),
        (["--resume"], "--resume needs --json FILE"),
        (["--quick", "--resume", "--json", "a.json"], "--resume does not go with --quick"),
    ],
    ids=lambda it: " ".join(it) if isinstance(it, list) else "",
)
def test_bad_arguments_are_told_in_a_line_before_anything_is_measured(words, complaint, tmp_path):
    (tmp_path / "corrupt.json").write_text('{"date": "2026')
    (tmp_path / "empty.json").write_text("[]")
    done = bench(*words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert complaint in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_link_to_the_results_stays_a_link(tmp_path):
    (tmp_path / "link.json").symlink_to("real.json")
    results.write(tmp_path / "link.json", results.start())
    assert (tmp_path / "link.json").is_symlink()
    assert results.read(tmp_path / "real.json").results == []


def test_an_unknown_command():
    done = commands.run("tell")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "invalid choice: 'tell'" in done.stderr


@pytest.mark.exhaustive
def test_without_what_is_optional():
    modules = ["rich", "matplotlib", "pytest", "pytest_benchmark", "triton"]
    python = ("-c", WITHOUT.format(modules=modules))
    refused = bench("--only", TINY, "--plot", "out.png", python=python)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "--plot needs matplotlib: pip install 'mpkernels[bench]'" in refused.stderr
    done = bench("--only", TINY, python=python)
    assert done.returncode == 0, done.stderr
    assert "rich is not installed" in done.stdout
    assert "1 pairs on" in done.stdout


def test_quick_measures_a_case_in_turns(tmp_path):
    path = tmp_path / "quick.json"
    unhurried = "from mpkernels.bench import command; command.QUICK_SECONDS = 1e9; sys.exit"  # on a busy machine, too
    python = WITHOUT.format(modules=["rich"]).replace("sys.exit", unhurried)
    done = bench("--quick", "--only", "unscale_", "--json", path, python=("-c", python), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (pair,) = json.loads(path.read_text())["pairs"]
    turns = re.findall(r"(\d)/4 unscale_", done.stderr)
    assert turns == ["1", "2", "3", "4"]
    assert len(pair["ours us"]) == len(pair["torch us"]) >= 4 * 6
    assert done.stdout.count("unscale_ cpu") == 1  # all turns together
    doubt = "; 1 of them are in doubt" * bool(results.read(path).results[0].doubts)
    says = rf"\n\d of 1 cases are faster than torch, \d slower{doubt}\.\nthe picture: .*\.png\n$"
    assert re.search(says, done.stdout)
    assert (tmp_path / "mpkernels-bench.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.exhaustive
def test_stopped_it_shows_and_keeps_what_it_has(tmp_path):
    path = tmp_path / "new.json"
    command = [sys.executable, "-m", "mpkernels", "bench", "--only", "unscale_ cpu-1", "--json", str(path)]
    listens = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # what a shell has put in the background ignores it
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, preexec_fn=listens, **pipes) as process:
        for line in process.stdout:
            if "vs torch" in line:
                break
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "measured so far" in rest
    assert "Traceback" not in errors
    assert json.loads(path.read_text())["pairs"]


def test_what_is_left_out_is_said():
    done = bench("--list")
    assert done.returncode == 0
    assert "vs apex  (left out: apex " in done.stdout
    names = [line.partition("  (")[0] for line in done.stdout.splitlines()]
    assert len(names) == len(set(names)) > 100
    quick = bench("--list", "--quick").stdout.splitlines()
    assert {name.split()[0] for name in quick} == {"unscale_", "grad_stats", "step", "linear_act", "train"}


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_are_read_as_they_were_written(path, tmp_path):
    from mpkernels.bench import results

    run = results.read(path)
    results.write(tmp_path / "again.json", run)
    assert results.read(tmp_path / "again.json") == run


def test_a_reader_that_leaves_early():
    """As ``| head -1`` does."""
    command = [sys.executable, "-m", "mpkernels", "bench", "--list"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        errors = process.stderr.read()
    assert (process.returncode, errors) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux's")
def test_a_full_disk_is_told_in_a_line():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "mpkernels", "bench", "--list"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "mpkernels bench: No space left on device\n")


@pytest.mark.exhaustive
def test_a_terminal_without_blocks():
    done = bench("--only", TINY, python=("-m", "mpkernels"), env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert "??" in done.stdout  # the bar
