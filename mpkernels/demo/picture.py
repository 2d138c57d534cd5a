"""Draws the picture: loss, bytes, time of the optimizer's step, and the loss scale around an overflow."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import quantiles
from typing import Any

from mpkernels.demo.training import BF16, FP32, OURS, OURS_8_BIT, OVERFLOWING, Training, Way

COLORS = {FP32: "#5b5b5b", BF16: "#d1662f", OURS: "#2f6fd1", OURS_8_BIT: "#27a0a5"}  # the colour-blind see them apart
SHADES = {"weight": 1.0, "grad": 0.6, "state": 0.3}
GROUND = "#fafafa"  # light on dark pages, too
STYLE: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.facecolor": GROUND}


def draw(trainings: Sequence[Training], times: Mapping[Way, Sequence[float]], title: str, path: Path) -> None:
    """Draw four panels. ``times`` has the seconds of the optimizer's step."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(10, 6.4), facecolor=GROUND, layout="constrained")
        figure.suptitle(title)
        (losses, sizes), (steps, scales) = figure.subplots(2, 2)
        _losses(losses, trainings)
        _bytes(sizes, trainings)
        _times(steps, times)
        _scales(scales, next(it.scales for it in trainings if it.way == OURS))
        figure.savefig(path, dpi=150)


def _losses(ax: Any, trainings: Sequence[Training]) -> None:
    for training in trainings:
        steps, losses = zip(*training.losses.items(), strict=True)
        way, words = training.way, f"{training.way.name}: {losses[-1]:.3f}"
        # The first curve is wide, and ours are dashed, so that curves that coincide can all be seen.
        style = {"linewidth": 4, "alpha": 0.5} if way == FP32 else {"linestyle": "--" if way.moments else "-"}
        ax.plot(steps, losses, color=COLORS[way], label=words, **style)
    lowest = min(training.losses[steps[-1]] for training in trainings)
    ax.set(ylim=(lowest - 0.02, lowest + 0.3), title="Held-out loss", xlabel="step")
    ax.legend(frameon=False)


def _bytes(ax: Any, trainings: Sequence[Training]) -> None:
    for training in trainings:
        sizes, name, bottom = training.bytes_per_parameter(), _label(training.way), 0.0
        for kind, size in sizes.items():
            ax.bar(name, size, bottom=bottom, color=COLORS[training.way], alpha=SHADES[kind], width=0.6)
            ax.text(name, bottom + size / 2, kind, ha="center", va="center", fontsize=8)
            bottom += size
        ax.text(name, bottom, f"{bottom:.1f}", ha="center", va="bottom", fontweight="bold")
    ax.set_title("Bytes a parameter")


def _times(ax: Any, times: Mapping[Way, Sequence[float]]) -> None:
    for way, seconds in times.items():
        low, middle, high = (1e3 * it for it in quantiles(seconds, n=4))
        ax.bar(_label(way), middle, color=COLORS[way], width=0.6, yerr=[[middle - low], [high - middle]], capsize=3)
        ax.text(_label(way), high, f"{middle:.1f}", ha="center", va="bottom", fontweight="bold")
    ax.set_title("Unscale, clip and step: ms, with quartiles")


def _label(way: Way) -> str:
    return way.name.replace(", ", ",\n")


def _scales(ax: Any, scales: Sequence[float]) -> None:
    ax.step(range(1, len(scales) + 1), scales, where="post", color=COLORS[OURS])
    ax.set_yscale("log", base=2)
    ax.margins(y=0.4)  # room for the note
    ax.set(title="Loss scale of mpkernels", xlabel="step")
    arrow = {"arrowstyle": "->", "color": COLORS[BF16]}
    for step, (before, after) in enumerate(pairwise(scales), 2):
        if after < before:
            note = f"step {step} is skipped:\nan inf in {OVERFLOWING}"
            ax.annotate(note, (step, after), (0.03, 0.85), textcoords="axes fraction", arrowprops=arrow)
