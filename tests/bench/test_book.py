"""RESULTS.md, its pictures, README's numbers and the headline say what was measured, and no more."""

import re
import shutil
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from benchmarks import (
    adamw_beside_others,
    book,
    cases,
    performance_page,
    raw_samples,
    readme_minutes,
    readme_numbers,
    result_pictures,
)
from benchmarks.raw_samples import Session
from mpkernels.bench import cases as shipped
from mpkernels.bench import show, steps
from mpkernels.bench.results import Result
from mpkernels.bench.settings import Place, Setting, Sizes
from tests import ROOT

pytestmark = pytest.mark.exhaustive


@pytest.fixture
def copy(tmp_path):
    for path in ("README.md", "docs/performance.md", "benchmarks/RESULTS.md", book.COUNTED):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    for folder in ("results", "pictures"):
        shutil.copytree(ROOT / "benchmarks" / folder, tmp_path / "benchmarks" / folder)
    return tmp_path


def files(pattern):
    return sorted(book.ROOT.glob(f"benchmarks/{pattern}"))


def test_the_book_is_what_the_raw_files_say(capsys):
    assert book.main(["--check"]) == 0, capsys.readouterr().out


def written_in(begin):
    """Return a function that types a number into a page's table."""

    def typed(text):
        at = text.index("| ", text.index(begin))
        return text[:at] + "| 9.99 " + text[at:]

    return typed


def another_number(text):
    return text.replace("1", "2", 1)


def other_samples(text):
    return text.replace('us":[', 'us":[1,1,1,1,1,1,1,1,1,', 2)


PAGE, RULE = "docs/performance.md", "benchmarks/results/rule/cuda-h200-2026-11-26.json"
TABLES = {
    "benchmarks/RESULTS.md": ["|---"],
    PAGE: [book.BEGIN.format(table) for table in ("cpus", "gpus", "calls", "loops")],
}
CHANGES = [
    ("README.md", lambda text: text.replace("* **", "* **9", 1), "README.md"),
    *((name, written_in(begin), name) for name, begins in TABLES.items() for begin in begins),
    *(
        (f"benchmarks/pictures/{it.name}", lambda text: text.replace("1", "2", 1), it.name)
        for it in files("pictures/*")
    ),
    *((f"benchmarks/results/{it.name}", other_samples, "RESULTS.md") for it in files("results/*.json")),
    (RULE, lambda text: text.replace('"native": ', '"native": 9'), PAGE),
]


@pytest.mark.parametrize(("name", "change", "drifted"), CHANGES, ids=lambda it: it if isinstance(it, str) else "")
def test_a_change_by_hand_is_noticed(copy, capsys, name, change, drifted):
    path = copy / name
    text = path.read_text()
    path.write_text(change(text))
    assert book.main(["--check"], copy) == 1
    assert f"{drifted} has drifted" in capsys.readouterr().out
    if name.endswith(drifted):
        assert book.main([], copy) == 0
        assert path.read_text() == text


@pytest.mark.parametrize(
    ("clock", "name"), [(clock, it) for clock, names in performance_page.GPUS.items() for it in names]
)
def test_a_page_says_with_which_clock_a_gpu_was_timed(monkeypatch, clock, name):
    for module in (cases, shipped):
        monkeypatch.setattr(module, "places", lambda: [Place("cuda", 1)])
    [found] = [it for it in cases.all_cases() if it.name == name]
    assert found.prepare().clock == clock


@pytest.mark.parametrize("name", ["results/orphan.svg", "pictures/orphan.svg", "pictures/orphan.csv"])
def test_a_chart_of_no_results_is_noticed(copy, name):
    orphan = copy / "benchmarks" / name
    orphan.write_text("<svg/>")
    assert book.main(["--check"], copy) == 1
    assert book.main([], copy) == 0
    assert not orphan.exists()


def result(ours, theirs, **more):
    return Result("op", "", "cuda", "bf16", "case", "native", 10**6, 0.0, [ours] * 6, [theirs] * 6, **more)


def test_a_training_step_short_of_its_aim_is_named():
    slow, fast = replace(result(100.0, 149.0), op="train"), replace(result(100.0, 150.0), op="train", case="fast")
    page = book.book({"h200": Session("2026-11-21", {"gpu": "NVIDIA H200"}, results=[slow, fast])})
    assert "2 faster, 0 even, 0 slower. Short of 1.5 times: case.\n" in page


@pytest.mark.parametrize("clips", [True, False])
def test_both_sides_take_the_same_step(clips, monkeypatch):
    """Our step ends at the weights of torch's fused AdamW."""
    made, parameters = [], steps.parameters
    monkeypatch.setattr(steps, "parameters", lambda *words: made.append(parameters(*words)) or made[-1])
    rival = next(adamw_beside_others.rivals(Place("cpu", 1)))
    pair = adamw_beside_others.compare(Setting(Place("cpu", 1), "fp32", Sizes("small", ((1000,),) * 3)), rival, clips)
    for side in (pair.ours, pair.theirs):
        run = side()
        for _ in range(5):
            run()
    for ours, theirs in zip(*made, strict=True):
        assert_close(ours, theirs)
    norms = [torch.nn.utils.get_total_norm([it.grad for it in params]) for params in made]
    assert [round(float(norm), 3) == steps.MAX_NORM for norm in norms] == [False, clips]  # ours writes no grads


def test_torchs_fused_step_is_compared_with_bf16_moments_where_it_takes_them():
    optimizer = adamw_beside_others._with_bf16_moments([torch.nn.Parameter(torch.ones(4))])
    (state,) = optimizer.state.values()
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
    rivals = {it.name: it for it in adamw_beside_others.rivals(Place("cpu", 1))}
    assert "on CUDA alone" in rivals["torch fused, bf16 moments"].missing


def compared_on_a_cpu():
    """Return a CPU's run that has been compared with other libraries."""
    runs = {path.stem: raw_samples.read(path) for path in files("results/*.json")}
    return next(run for run in book._compared(runs).values() if not run.is_on_gpu and not run.machine.get("gpu"))


def test_no_ratio_is_shown_that_other_programs_have_disturbed():
    """Counts are shown nevertheless."""
    run = compared_on_a_cpu()
    found = result_pictures.compared(run)
    busy = replace(run, results=[replace(it, waited=0.2) for it in run.results])
    assert [family.name for family in result_pictures.of_run("cpu", busy)] == ["bytes-cpu"]
    header, _, row, *_ = readme_numbers.beside({"cpu": busy})
    assert header.endswith("| bytes a parameter: ours / theirs |")
    assert row == "| bf16 weights, fp32 moments; beside torch's fused, fp32 weights | 14 / 16 |"
    partly = replace(run, results=[*found[:-1], replace(found[-1], waited=0.2)])
    times, _ = result_pictures.of_run("cpu", partly)
    assert len(times.rows) == 2 * (len(found) - 1)


def test_a_run_that_was_cut_off_shows_what_it_has():
    run = compared_on_a_cpu()
    only = replace(run, results=[it for it in run.results if it.baseline == "torchao-8bit"])
    _, _, row, *_ = readme_numbers.beside({"cpu": only})
    assert row.startswith("| fp32 weights, 8-bit moments; beside torchao's |")


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        ([300.0] * 9, "AdamW's step in bf16, with clipping, is 3.00 times as fast as torch's"),
        ([99.0, 100.0, 101.0] * 3, "AdamW's step in bf16, with clipping, is as fast as torch's"),
        ([50.0] * 9, "AdamW's step in bf16, with clipping, is 0.50 times as fast as torch's"),
    ],
)
def test_the_headline_says_what_was_measured(theirs, says):
    assert show.headline(replace(result(100.0, 100.0), op="step", ours_us=[100.0] * 9, torch_us=theirs)) == says


@pytest.mark.parametrize(
    ("waited", "theirs", "why"),
    [
        (0.0, [1400.0, 1591.0, 1700.0] * 3, "the 95 % interval of the ratio spans more than 10% of it"),
        (0.0, [90.0, 101.0, 112.0] * 3, "the 95 % interval of the ratio spans more than 10% of it"),
        (0.2, [1591.0] * 9, "threads waited for a core more than 5% of the time"),
    ],
    ids=["wide", "wide around 1", "busy"],
)
def test_the_headline_gives_no_figure_where_the_machine_was_busy(waited, theirs, why):
    text = show.headline(replace(result(100.0, 100.0), op="step", ours_us=[100.0] * 9, torch_us=theirs, waited=waited))
    assert text.startswith(f"this machine was busy: {why}; so it can't be told how fast AdamW's step in bf16, with")
    assert text.count("1") == why.count("1") + "bf16".count("1")


def test_results_in_doubt_are_counted_apart():
    found = [result(1.0, theirs) for theirs in (0.5, 1.0, 2.0, 3.0)]
    run = Session("2026-11-21", {"gpu": "NVIDIA H200"}, results=found)
    assert show.summary(run) == "4 pairs on NVIDIA H200: 2 faster, 1 even, 1 slower"
    run.results[0] = replace(found[0], waited=0.2)
    assert show.summary(run).startswith("4 pairs on NVIDIA H200: 2 faster, 1 even, 0 slower, 1 in doubt\n")


def test_the_summary_ends_with_the_headline_on_the_step():
    step = replace(result(1.0, 2.0), op="step")
    run = Session("2026-11-21", {"gpu": "NVIDIA H200"}, results=[result(1.0, 1.0), step])
    assert show.summary(run).splitlines()[-1] == f"{show.headline(step)}."


def test_a_later_run_on_one_thread_hides_nothing():
    both, one = (
        Session(
            date,
            {"gpu": None, "cpu": "Abacus", "cores": 2, "torch": "2.13.0"},
            results=[
                replace(result(100.0, 150.0), place=place, op="step", baseline="torch.amp fused") for place in places
            ],
        )
        for date, places in (("2026-11-25", ["cpu-1", "cpu-2"]), ("2026-11-26", ["cpu-1"]))
    )
    (_, machine), rows = readme_numbers.rows([book._front({"both": both, "one": one})])
    assert machine.startswith("Abacus, 2 cores")
    assert dict(rows)[readme_numbers.STEP] == "**1.50**; one thread **1.50**"


def test_a_cpu_is_not_called_by_the_gpu_beside_it():
    """A machine with a GPU may have measured its CPU alone."""
    machine = {"gpu": "NVIDIA H200", "cpu": "Abacus", "cores": 16, "torch": "2.11.0"}
    on_cpu = replace(result(100.0, 150.0), place="cpu-2", op="step", baseline="torch.amp fused")
    runs = {"host": Session("2026-11-26", machine, results=[on_cpu])}
    assert "## Abacus, 2026-11-26" in book.book(runs)
    runs["h200"] = replace(runs["host"], results=[replace(on_cpu, place="cuda", torch_us=[300.0] * 6)])
    header = next(line for line in book.book(runs).splitlines() if line.startswith("| times torch's speed"))
    assert [cell.partition(" (")[0] for cell in header.strip("| ").split(" | ")[1:]] == [
        "NVIDIA H200, torch 2.11.0",
        "Abacus, 2 of 16 cores, torch 2.11.0",
    ]


def test_the_table_of_machines_shows_one_thread_beside_all():
    def step(place, theirs, **more):
        words = {"op": "step", "place": place, "baseline": "torch.amp fused"} | more
        return replace(result(100.0, theirs), **words)

    found = [
        step("cpu-1", 150.0),
        step("cpu-16", 250.0),
        step("cpu-1", 110.0, variant="imports", baseline="torch fused"),
    ]
    run = Session("2026-11-25", {"gpu": None, "cpu": "Abacus", "torch": "2.13.0"}, results=found)
    (_, machine), cells = readme_numbers.rows([book._front({"abacus": run})])
    assert machine.startswith("Abacus, 16 cores")
    rows = dict(cells)
    assert rows[readme_numbers.STEP] == "**2.50**; one thread **1.50**"
    assert rows["the same calls, only the imports changed, both over fp32"] == "not measured; one thread **1.10**"
    (_, machine), cells = readme_numbers.rows([book._front({"abacus": replace(run, results=found[:1])})])
    assert machine.startswith("Abacus, 1 cores")
    assert dict(cells)[readme_numbers.STEP] == "**1.50**"


def test_the_minutes_that_readme_and_the_tests_promise_are_those_that_were_measured():
    (took,) = map(readme_minutes.minutes, (ROOT / "benchmarks" / "results" / "readme").iterdir())
    pattern = r"the build takes (\d+) minutes where it finds `nvcc`.*, the\s+demo (\d+) and\s+the\s+tests (\d+)"
    assert [*map(int, re.search(pattern, (ROOT / "README.md").read_text()).groups())] == [*took.values()]
    assert f"some {took['tests']} minutes" in (ROOT / "tests" / "summary.py").read_text()
