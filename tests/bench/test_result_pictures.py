"""RESULTS.md's pictures and the numbers of README's first screen come from the raw samples alone."""

import csv
import io
import json
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from benchmarks import adamw_beside_others, book, chart, offload_on_paper, readme_numbers, result_pictures
from benchmarks.raw_samples import Session
from mpkernels.bench import steps
from mpkernels.bench.results import Result
from mpkernels.bench.settings import Place, Setting, Sizes

MACHINE = {"gpu": None, "cpu": "AMD EPYC, family 25 model 1", "cores": 2, "torch": "2.13.0", "mpkernels": "0.1.0"}
LIGERS = """\
kernel_name kernel_provider kernel_operation_mode metric_name metric_unit x_name x_label x_value y_value_50 y_value_20
y_value_80 extra_benchmark_config_str gpu_name timestamp liger_version"""


def session(kept=(14.0, 16.0), ratio=2.0):
    """Return a run of all that adamw_beside_others.py compares. Ours takes 1 to 6 us, the others ``ratio`` times as
    long on one thread, twice that on two."""
    found = []
    for threads in (1, 2):
        for case in adamw_beside_others.comparisons(Place("cpu", threads)):
            sizes = case.setting.sizes
            counts = {
                name: {"kept": int(each * sizes.elements), "peak memory": int((each + 1) * sizes.elements)}
                for name, each in zip(("ours", "theirs"), kept, strict=True)
            }
            place, dtype = str(case.setting.place), case.setting.dtype
            ours = [float(it) for it in range(1, 7)]
            theirs = [ratio * threads * it for it in ours]
            found.append(
                Result(
                    case.op, case.variant, place, dtype, sizes.name, "native", 1, 0.0, ours, theirs, case.baseline,
                    counts=counts,
                )
            )  # fmt: skip
    return Session("2026-11-26", MACHINE, results=found)


def rows_of(family, tmp_path):
    (text,) = (text for path, text in family.files(tmp_path).items() if path.suffix == ".csv")
    return list(csv.DictReader(io.StringIO(text)))


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


def test_all_lengths_fill_blocks_of_8_bit_moments():
    """With other lengths, torchao would keep fp32 moments."""
    lengths = {length for sizes in adamw_beside_others.SIZES for (length,) in sizes.shapes}
    assert [length % adamw_beside_others.BLOCK for length in lengths] == [0] * 3
    assert lengths == {49_999_872, 499_968, 5_120}  # the nearest multiples of 256


def test_the_columns_are_ligers_except_the_version():
    assert [*result_pictures.HEADER[:-1], "liger_version"] == LIGERS.split()


def test_each_side_of_each_pair_is_a_row_with_its_quantiles(tmp_path):
    times, _ = result_pictures.of_run("cpu", session())
    rows = rows_of(times, tmp_path)
    assert len(rows) == 2 * len(session().results)
    ours, theirs = rows[:2]
    assert (ours["kernel_provider"], theirs["kernel_provider"]) == (
        "mpkernels, fp32 weights, fp32 moments",
        "torch fused",
    )
    assert [ours[f"y_value_{it}"] for it in (20, 50, 80)] == ["0.002", "0.0035", "0.005"]  # ms
    assert [theirs[f"y_value_{it}"] for it in (20, 50, 80)] == ["0.004", "0.007", "0.01"]
    assert json.loads(ours["extra_benchmark_config_str"]) == {"place": "cpu-1", "beside": "torch fused"}
    assert len({tuple(row.values()) for row in rows}) == len(rows)


def test_bytes_are_those_of_a_parameter(tmp_path):
    _, kept = result_pictures.of_run("cpu", session())
    found = {(row["kernel_provider"], row["metric_name"]): row["y_value_50"] for row in rows_of(kept, tmp_path)}
    assert found["torch fused", "kept memory"] == "16"
    assert found["torch fused", "peak memory"] == "17"
    assert found["mpkernels, bf16 weights, 8-bit moments", "kept memory"] == "14"


def test_a_picture_has_a_dot_for_each_pair():
    times, kept = result_pictures.of_run("cpu", session())
    titles = times.picture.count("<title>")
    assert titles == len(session().results)
    x = chart.TIMES.across(4.0)
    assert f'class="first" cx="{x:.1f}"' in times.picture  # two threads: 4 times
    assert "<title>torch fused, kept: weight, grad and states: 16.00</title>" in kept.picture


def test_the_first_screen_is_short_and_names_no_long_machine():
    runs = {"cpu": session()}
    lines = list(readme_numbers.numbers(runs, [], book.ROOT.glob("benchmarks/results/models/*.json")))
    assert len(lines) <= 5 + len(readme_numbers.BESIDE)  # two of the header, three below the rows
    row = next(
        line for line in lines if line.startswith("| bf16 weights, fp32 moments; beside torch's fused, fp32 weights")
    )
    four, two = "**4.00** (4.00 to 4.00)", "**2.00** (2.00 to 2.00)"
    assert row.split(" | ")[1:] == ["14 / 16", four, two, four, f"{two} |"]
    assert "times as fast: clip and step, AMD Zen 3, 2 cores |" in lines[0]
    assert "AMD Zen 3, 2 cores: [samples](benchmarks/results/cpu.json)" in "".join(lines)
    assert not any("family" in line for line in lines)


def test_the_bytes_that_offload_leaves_are_those_of_its_page():
    kept = [sum(offload_on_paper.kept(choice)) + choice.weights.itemsize for choice in CHOICES]
    found = session(kept=(kept[0], 16.0))
    for result in found.results:
        if "8bit" in result.variant:
            result.counts["ours"]["kept"] = int(kept[1] * result_pictures.ELEMENTS[result.case])
    (line,) = (line for line in readme_numbers.numbers({"cpu": found}, [], []) if "offload" in line)
    hosts = [states + weights for weights, states in map(offload_on_paper.kept, CHOICES)]
    assert f"{hosts[0]:.3g} are on the host, {hosts[1]:.3g} with 8-bit moments" in line


CHOICES = [
    it for it in offload_on_paper.CHOICES if (offload_on_paper.NAMES[it.weights], it.master) == ("bf16", "split")
][::2]


def test_a_model_that_keeps_all_its_memory_is_not_on_the_first_screen(tmp_path):
    path = tmp_path / "cpu.json"
    rows = [
        {
            "model": name,
            "dtype": "fp32",
            "peak": {"ours": share, "theirs": 100},
            "seconds": {"ours": [1, 1, 2], "theirs": [1, 2, 2]},
        }
        for name, share in (("GPT-2", 51), ("BERT", 100))
    ]
    path.write_text(json.dumps({"machine": MACHINE, "rows": rows}))
    (line,) = readme_numbers.numbers({}, [], [path])
    assert "AMD Zen 3, 2 cores: GPT-2 0.51 at 1.00 times the speed (fp32);" in line
    assert "0.95 or more in 1 others at 1.00 to 1.00 times the speed" in line
    assert "BERT" not in line


def test_no_ratio_is_shown_that_other_programs_have_disturbed():
    """Counts are shown nevertheless."""
    run = session()
    busy = replace(run, results=[replace(it, waited=0.2) for it in run.results])
    assert [family.name for family in result_pictures.of_run("cpu", busy)] == ["bytes-cpu"]
    header, _, row, *_ = readme_numbers.numbers({"cpu": busy}, [], [])
    assert header.endswith("| bytes a parameter: ours / theirs |")
    assert row == "| bf16 weights, fp32 moments; beside torch's fused, fp32 weights | 14 / 16 |"
    partly = replace(run, results=[*run.results[:-1], busy.results[-1]])
    times, _ = result_pictures.of_run("cpu", partly)
    assert len(times.rows) == 2 * (len(run.results) - 1)


def test_a_run_that_was_cut_off_shows_what_it_has():
    run = session()
    only = replace(run, results=[it for it in run.results if it.baseline == "torchao-8bit"])
    _, _, row, _ = readme_numbers.numbers({"cpu": only}, [], [])
    assert row.startswith("| fp32 weights, 8-bit moments; beside torchao's | 14 / 16 |")


def test_machines_without_these_rivals_are_beside_torch_alone():
    pair = Result(
        "step", "", "cuda", "bf16", "100x500k", "native", 1, 0.0, [1.0] * 6, [2.0] * 6, baseline="torch fused"
    )  # fmt: skip
    h200 = Session("2026-11-26", {"gpu": "NVIDIA H200", "cpu": "Z80"}, results=[pair])
    (line,) = readme_numbers.numbers({}, [book._front({"h200": h200})], [])
    assert "NVIDIA H200: **2.00** ([samples](benchmarks/results/h200.json))" in line


@pytest.mark.parametrize("name", ["step-cpu.svg", "step-cpu.csv", "bytes-cpu.svg", "bytes-cpu.csv"])
def test_other_samples_make_other_files(tmp_path, name):
    def text(run):
        files = {
            path.name: text
            for family in result_pictures.of_run("cpu", run)
            for path, text in family.files(tmp_path).items()
        }
        return files[name]

    assert text(session()) == text(session())
    assert text(session()) != text(session(kept=(13.0, 16.0), ratio=3.0))


def test_the_newest_run_of_a_device_is_drawn():
    older, newer = replace(session(), date="2026-11-25"), session()
    names = {family.name for family in book.all_families({"b": older, "a": newer}, [])}
    assert names == {"step-a", "bytes-a"}
