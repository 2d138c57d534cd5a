"""Writes from the raw samples: RESULTS.md, its charts, and the tables in README and docs/performance.md.

``python -m benchmarks.book`` writes these files. With ``--check`` it fails if one of them differs from the samples.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from statistics import median

from benchmarks import (
    chart,
    formatting,
    front_page,
    host,
    many_gpus,
    models,
    performance_page,
    raw_samples,
    readme_numbers,
    result_pictures,
)
from benchmarks.formatting import table
from benchmarks.raw_samples import Session
from mpkernels.bench import show
from mpkernels.bench.results import Result

ROOT = Path(__file__).parents[1]
COUNTED = "tests/proof/gate/table.json"
AIM = 1.5
SIZES_DIFFER = "A row's cases are those of its newest run below, which may hold other sizes than the pictures above."
BEGIN, END = "<!-- {} written by python -m benchmarks.book -->\n", "<!-- to here -->\n"

Groups = dict[str, list[Result]]
Cell = Callable[[Result, Session], str]


def group(found: Iterable[Result]) -> Groups:
    """Group results by the two sides that they compare. Groups and their cases are in alphabetical order."""
    groups: Groups = {}
    for result in sorted(found, key=lambda it: it.name):
        groups.setdefault(f"{f'{result.op} {result.variant}'.strip()} vs {result.baseline}", []).append(result)
    return dict(sorted(groups.items()))


def short_of_aim(found: list[Result]) -> str:
    """Name the whole training steps that are less than AIM times as fast as torch.amp's best."""
    short = [result.case for result in found if result.op == "train" and result.ratio.median < AIM]
    return f" Short of {AIM} times: {', '.join(short)}." if short else ""


def _ratio(result: Result, run: Session) -> str:
    low, middle, high = result.ratio
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


def _verdict(result: Result, run: Session) -> str:
    return ", ".join([show.verdict(result).replace("slower", "**slower**"), *result.doubts])


def _both(key: str, write: Callable[[float], str]) -> Cell:
    def cell(result: Result, run: Session) -> str:
        values = [result.counts.get(side, {}).get(key) for side in ("ours", "theirs")]
        return "" if None in values else " / ".join(map(write, values))

    return cell


COLUMNS: dict[str, Cell] = {
    "case": lambda result, run: f"{result.place} {result.dtype} {result.case}",
    "kernel": lambda result, run: result.kernel,
    "ours": lambda result, run: show.time(median(result.ours_us)),
    "theirs": lambda result, run: show.time(median(result.torch_us)),
    "speed": lambda result, run: formatting.speed(result),
    "of best": formatting.share,
    "x torch [95 %]": _ratio,
    "": _verdict,
    "kept, ours / theirs": _both("kept", formatting.size),
    "peak memory, ours / theirs": _both("peak memory", formatting.size),
    "saved for backward, ours / theirs": _both("saved", formatting.size),
    "launches": _both("launches", str),
    "host waits": _both("host waits", str),
}


def of_run(name: str, run: Session) -> Iterator[str]:
    yield from (f"## {run.device}, {run.date}", "")
    yield ", ".join(f"{key} {value}" for key, value in run.machine.items() if value is not None) + "."
    best = [f"a copy moves {speed / 1e9:.4g} GB/s on {place}" for place, speed in run.copy_speeds.items()]
    best += [f"a matrix product reaches {speed / 1e12:.3g} TFLOP/s for {it}" for it, speed in run.gemm_speeds.items()]
    yield f"Of best: {'; '.join(best)}. Raw samples: [{name}.json](results/{name}.json)."
    yield from ("", f"![times torch, each case a dot](results/{name}.svg)", "")
    for title, members in group(run.results).items():
        columns = {header: [cell(it, run) for it in members] for header, cell in COLUMNS.items()}
        used = {header: column for header, column in columns.items() if any(column)}
        yield from (f"### {title}", "", f"{show.tally(members)}.{short_of_aim(members)}", "")
        yield from table(used, zip(*used.values(), strict=True))
    if run.skipped:
        yield from ("Left out:", "", *(f"* {case}: {reason}" for case, reason in run.skipped.items()), "")


def book(runs: dict[str, Session], scaled: Iterable[Path] = (), fused: Iterable[Path] = ()) -> str:
    lines = [
        "# Results",
        "",
        "Written by `python -m benchmarks.book` from the raw samples in [results](results); nothing is typed by hand.",
        "x torch: torch's time over ours, the median of pairs measured in turns, and its 95 % interval. Above 1 ours "
        "is faster; even: the interval holds 1. wide: it spans more than 10 %. busy: others used the machine.",
        "",
    ]
    for family in all_families(runs, fused):
        lines += family.lines()
    machines = [_front(it) for it in _by_device(runs).values()]
    lines += ["## AdamW beside other libraries", "", *readme_numbers.beside(_compared(runs))]
    lines += ["## All machines", "", SIZES_DIFFER, "", *table(*readme_numbers.rows(machines))]
    for name, run in sorted(runs.items(), key=_age, reverse=True):
        lines += of_run(name, run)
    return "\n".join([*lines, *past_one_device(scaled), *whole_models(fused)])


def all_families(runs: dict[str, Session], fused: Iterable[Path]) -> list[result_pictures.Family]:
    """Return the families of each device's newest run that has some, and those of whole models."""
    families = chain.from_iterable(result_pictures.of_run(name, run) for name, run in _compared(runs).items())
    return [*families, *map(result_pictures.of_models, fused)]


def _compared(runs: dict[str, Session]) -> dict[str, Session]:
    """Return the newest run of each device that has been compared with other libraries."""
    newest = {run.device: (name, run) for name, run in sorted(runs.items(), key=_age) if result_pictures.compared(run)}
    return dict(newest.values())


def whole_models(measured: Iterable[Path]) -> Iterator[str]:
    """Yield the lines on whole models, which benchmarks/models.py has measured."""
    for path in measured:
        yield from (f"## Whole models, fused: {path.stem}", "")
        yield (
            "A forward and backward of models of transformers with 4 layers and 4 x 512 tokens (ViT: 8 images), on a "
            "GPU 8 times as many, fused / as they are (share), in turns ([models.py](models.py), "
            f"[samples](results/models/{path.name})).{models.how_chosen(path)} "
            "x torch: the median of pairs (least to most). Peak: the most that was allocated at a time beside weights. "
            "Saved: what the forward keeps for the backward, beside weights and inputs. Compiled: by torch.compile, "
            "whose own time does not count."
        )
        yield ""
        yield from table(*models.table(path))


def past_one_device(measured: Iterable[Path]) -> Iterator[str]:
    """Yield the lines on a step's cost on each of many GPUs: counted, then the host's time, which is measured."""
    yield from ("## Past one device, counted", "")
    yield (
        "A step of Llama 3 on each of so many GPUs under FSDP2, ours (bf16 with a split master) / torch's (fp32, "
        "unscale_, clip, fused): GB of weights, grads and states, GB moved, launches."
    )
    yield ""
    yield from table(["", "GPUs", "GB held", "GB moved", "launches"], many_gpus.counted())
    for path in measured:
        yield from (f"## Past one device, the host's time: {path.stem}", "")
        yield (
            "The same steps on so many DTensors, with a [fake process group](many_gpus.py), so that collectives "
            "take no time; the least of 40 samples in turns, on cores that others used, too. "
            "[A test](../tests/distributed/test_cost_of_many_gpus.py) counts calls, to show what these times show "
            "roughly: the host's cost is flat in ranks and linear in tensors."
        )
        yield ""
        yield from table(["DTensors", "ranks", "ours / torch", "x torch", "collectives"], many_gpus.measured(path))


def readme(text: str, runs: dict[str, Session]) -> str:
    """Return README's text with new numbers on its first screen."""
    return _filled("README.md", text, {"numbers": front_page.lines(_first_screen(runs))})


def _first_screen(runs: dict[str, Session]) -> front_page.Found | None:
    return front_page.find(_compared(runs), map(_front, _by_device(runs).values()), runs)


def performance(
    text: str,
    runs: dict[str, Session],
    ruled: Iterable[Path],
    counted: Path,
    hosts: Iterable[Path] = (),
    fused: Iterable[Path] = (),
) -> str:
    """Return the text of docs/performance.md with new tables."""
    machines = [_front(it) for it in _by_device(runs).values()]
    columns = {header: COLUMNS[header] for header in ("x torch [95 %]", "", "of best")}
    gpu_tables = (performance_page.of_gpu(*item, columns) for item in _by_device(runs).items())
    parts = {
        "elsewhere": readme_numbers.elsewhere(_compared(runs), machines, fused),
        "cpus": table(*performance_page.of_cpus(runs)),
        "gpus": chain.from_iterable(table(header, rows) for header, rows in gpu_tables if rows),
        "calls": chain.from_iterable(table(*performance_page.calls(path)) for path in ruled),
        "loops": table(*performance_page.of_loops(counted)),
        "host": chain.from_iterable(table(*host.table(path)) for path in hosts),
    }
    return _filled("docs/performance.md", text, parts)


def _filled(name: str, text: str, parts: dict[str, Iterable[str]]) -> str:
    """Return the page's text, with these parts between the marks that name them."""
    for part, lines in parts.items():
        begin = BEGIN.format(part)
        before, found_begin, rest = text.partition(begin)
        _, end, after = rest.partition(END)
        if not (found_begin and end):
            raise SystemExit(f"{name}: the lines {begin.strip()} and {END.strip()} are missing")
        text = before + begin + "\n".join(lines).rstrip("\n") + "\n" + end + after
    return text


def _by_device(runs: dict[str, Session]) -> dict[str, dict[str, Session]]:
    """Return all runs of each device, the oldest first."""
    by_device: dict[str, dict[str, Session]] = {}
    for name, run in sorted(runs.items(), key=_age):
        by_device.setdefault(run.device, {})[name] = run
    return by_device


def _age(item: tuple[str, Session]) -> tuple[str, str]:
    return item[1].date, item[0]


def _front(runs: dict[str, Session]) -> readme_numbers.Front:
    """Return what README shows of a machine. ``runs`` are all of its runs, the newest last."""
    newest = [*runs.values()][-1]
    best, groups, on_one = readme_numbers.place_of(*runs.values()), Groups(), Groups()
    source: dict[str, str] = {}  # row -> the run that it comes from
    for name, run in runs.items():
        measured = group(it for it in run.results if it.place == best)
        source |= dict.fromkeys(measured.keys() & readme_numbers.ROWS.values(), name)
        groups |= measured
        on_one |= group(it for it in run.results if it.place == "cpu-1")
    names = [name for name in runs if name in source.values()]
    return readme_numbers.Front(names, newest, best, groups, {} if best == "cpu-1" else on_one)


def pages(root: Path) -> dict[Path, str]:
    """Return the text of each file that the book consists of."""
    here = root / "benchmarks"
    runs = {path.stem: raw_samples.read(path) for path in sorted((here / "results").glob("*.json"))}
    charts = {here / "results" / f"{name}.svg": chart.draw(group(run.results)) for name, run in runs.items()}
    scaled, fused = (sorted((here / "results" / name).glob("*.json")) for name in ("scale", "models"))
    ruled, hosts = (
        sorted((here / "results" / name).glob(it)) for name, it in (("rule", "cuda-*.json"), ("host", "*.json"))
    )
    screen, page = root / "README.md", root / "docs" / "performance.md"
    for family in all_families(runs, fused):
        charts |= family.files(here / "pictures")
    return {
        here / "RESULTS.md": book(runs, scaled, fused),
        screen: readme(screen.read_text(), runs),
        page: performance(page.read_text(), runs, ruled, root / COUNTED, hosts, fused),
        **charts,
        **front_page.pictures(_first_screen(runs), root),
    }


def main(words: list[str], root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.book", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail where something has drifted")
    arguments = parser.parse_args(words)
    wanted = pages(root)
    drawn = (path for path in root.glob("benchmarks/*/*") if path.suffix in (".svg", ".csv"))
    stale = [path for path in drawn if path not in wanted]
    drifted = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    if arguments.check:
        for path in drifted + stale:
            print(f"{path.relative_to(root)} has drifted from the raw files: run python -m benchmarks.book")
        return int(bool(drifted + stale))
    for path in drifted:
        path.parent.mkdir(exist_ok=True)
        path.write_text(wanted[path])
    for path in stale:
        path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
