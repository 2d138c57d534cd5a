"""Ratios as bars with their intervals, in mid-tones on nothing: it can be read on a light page and on a dark one."""

from pathlib import Path
from textwrap import fill
from typing import Any

from mpkernels.bench.results import Result, Run
from mpkernels.bench.show import headline, size, verdict

GREY = "#808080"
COLOURS = {"faster": "#2f9e6e", "slower": "#d9534f", "even": GREY}
INK: dict[str, Any] = {"color": GREY}


def draw(run: Run, path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(12, 1.8 + 0.42 * len(run.results)), layout="constrained")
    for row, result in enumerate(run.results):
        low, middle, high = result.ratio
        colour, alpha = COLOURS[verdict(result)], 0.4 if result.doubts else 1.0
        axes.barh(row, middle - 1, left=1, color=colour, alpha=alpha, height=0.62)
        axes.errorbar(middle, row, xerr=[[middle - low], [high - middle]], fmt="none", capsize=3, ecolor=GREY)
        axes.text(max(high, 1) * 1.03, row, _numbers(result), va="center", fontsize=9, **INK)
    axes.axvline(1, linewidth=1, **INK)
    axes.set_yticks(range(len(run.results)), [it.name.replace(f" {it.place}", "") for it in run.results], fontsize=9)
    axes.invert_yaxis()
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axes.set_xlim(right=1.6 * max([1.0, *(it.ratio.high for it in run.results)]))  # for the numbers
    axes.set_xlabel("torch's time over ours, with the 95 % interval of its median: right of 1, ours is faster", **INK)
    axes.set_facecolor("none")
    axes.tick_params(colors=GREY, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(GREY)
    figure.suptitle(fill(headline(run), 100), x=0.01, ha="left", fontsize=12, weight="bold", **INK)
    axes.set_title(_machine(run), loc="right", fontsize=9, **INK)
    figure.savefig(path, transparent=True, dpi=120)
    pyplot.close(figure)


def _numbers(result: Result) -> str:
    ratio = ", ".join([f"{result.ratio.median:.2f}x", *result.doubts])
    peaks = [size(counted["peak memory"]) for counted in result.counts.values()]  # of ours and theirs
    return f"{ratio}, {' instead of '.join(peaks)}" if len({*peaks}) == 2 else ratio


def _machine(run: Run) -> str:
    places = ", ".join(sorted({it.place for it in run.results}))
    return f"{run.device}, {places}; torch {run.machine['torch']}, mpkernels {run.machine['mpkernels']}, {run.date}"
