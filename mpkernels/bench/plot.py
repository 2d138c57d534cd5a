"""Rooflines and ratios as a picture, in mid-tones on nothing: it can be read on a light page and on a dark one."""

from pathlib import Path
from statistics import median
from typing import Any

from mpkernels.bench.results import Result, Run
from mpkernels.bench.show import verdict

GREY = "#808080"
COLOURS = {"faster": "#2f9e6e", "slower": "#d9534f", "even": GREY}
INK = {"color": GREY}


def draw(run: Run, path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    results = sorted(run.results, key=lambda result: result.name)
    height = max(4.0, 1.5 + 0.25 * len(results))
    figure = pyplot.figure(figsize=(16, height))
    grid = figure.add_gridspec(2, 2, width_ratios=(3, 2))
    panels = figure.add_subplot(grid[:, 0]), figure.add_subplot(grid[0, 1]), figure.add_subplot(grid[1, 1])
    _ratios(panels[0], results)
    moved = {result.name: (result, float(result.moved)) for result in results if result.moved}
    computed = {result.name: (result, float(result.flops)) for result in results if result.flops}
    _roofline(panels[1], moved, run.copy_speeds, ("bytes that a call moves; dashed: a copy", "bytes a second"))
    _roofline(panels[2], computed, run.gemm_speeds, ("flops of a call; dashed: a matrix product", "flops a second"))
    for axes in panels:
        axes.set_facecolor("none")
        axes.tick_params(colors=GREY, which="both")
        for spine in axes.spines.values():
            spine.set_color(GREY)
    figure.suptitle(f"mpkernels {run.machine['mpkernels']}, torch {run.machine['torch']}, {run.device}", **INK)
    figure.tight_layout()
    figure.savefig(path, transparent=True, dpi=120)
    pyplot.close(figure)


def _ratios(axes: Any, results: list[Result]) -> None:
    """Torch's time over ours, each with its interval."""
    for row, result in enumerate(results):
        low, middle, high = result.ratio
        axes.barh(row, middle, color=COLOURS[verdict(result)], height=0.7)
        axes.plot((low, high), (row, row), **INK, linewidth=1.5)
        axes.text(high * 1.03, row, f"{middle:.2f}", va="center", fontsize=8, **INK)
    axes.axvline(1, linestyle="--", linewidth=1, **INK)
    axes.set_yticks(range(len(results)), [result.name for result in results], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("times torch: right of 1, ours is faster", **INK)
    axes.margins(x=0.12)


def _roofline(
    axes: Any, work: dict[str, tuple[Result, float]], roofs: dict[str, float], words: tuple[str, str]
) -> None:
    """How fast each case works, and this machine's own best."""
    for result, amount in work.values():
        speed = amount / median(result.ours_us) * 1e6
        axes.loglog(amount, speed, "o", color=COLOURS[verdict(result)], markersize=5)
    for i, (name, speed) in enumerate(roofs.items()):
        axes.axhline(speed, linestyle="--", linewidth=1, **INK)
        axes.annotate(name, (0.01 + 0.2 * i, speed), xycoords=("axes fraction", "data"), fontsize=8, va="bottom", **INK)
    axes.set_xlabel(words[0], **INK)
    axes.set_ylabel(words[1], **INK)
