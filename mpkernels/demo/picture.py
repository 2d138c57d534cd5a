"""The picture: loss, bytes, time of the optimizer's step, and the loss scale around an overflow."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from mpkernels.demo.optimizer_step import Timed
from mpkernels.demo.report import missing, place
from mpkernels.demo.training import BF16, FP32, OURS, OURS_8_BIT, OVERFLOWING, WAYS, Training

COLORS = {FP32: "#5b5b5b", BF16: "#d1662f", OURS: "#2f6fd1", OURS_8_BIT: "#27a0a5"}  # apart for the colour-blind, too
SHADES = {"weight": 1.0, "grad": 0.6, "state": 0.3}


def draw(trainings: Sequence[Training], timed: Timed, path: Path) -> None:
    if missing("matplotlib", path.name):
        return
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    # A light ground of its own, so that a dark page changes nothing.
    with pyplot.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = pyplot.subplots(2, 2, figsize=(10, 6.4), facecolor="#fafafa", layout="constrained")
        figure.suptitle(f"One training, four ways, on {place(trainings[0].device)}")
        for ax, panel in zip(axes.flat, (_losses, _bytes, _times, _scales), strict=True):
            ax.set_facecolor("#fafafa")
            panel(ax, trainings, timed)
        figure.savefig(path, dpi=150)
        pyplot.close(figure)


def _losses(ax: Any, trainings: Sequence[Training], _: Timed) -> None:
    for it in trainings:
        steps, losses = zip(*it.held_out, strict=True)
        # Where curves coincide, each is seen: the first is wide, the others are dashed.
        style = {"linewidth": 4, "alpha": 0.5} if it.way == FP32 else {"linestyle": "--" if it.way.is_ours else "-"}
        ax.plot(steps, losses, color=COLORS[it.way], label=f"{it.way.name}: {losses[-1]:.3f}", **style)
    lowest = min(it.held_out[-1][1] for it in trainings)
    ax.set_ylim(lowest - 0.02, lowest + 0.3)
    ax.set_title("Held-out loss")
    ax.set_xlabel("step")
    ax.legend(frameon=False)


def _bytes(ax: Any, trainings: Sequence[Training], _: Timed) -> None:
    for it in trainings:
        bottom = 0.0
        for kind, size in it.bytes_per_parameter().items():
            ax.bar(it.way.name, size, bottom=bottom, color=COLORS[it.way], alpha=SHADES[kind], width=0.6)
            ax.text(it.way.name, bottom + size / 2, kind, ha="center", va="center", fontsize=8)
            bottom += size
        ax.text(it.way.name, bottom, f"{bottom:.1f}", ha="center", va="bottom", fontweight="bold")
    ax.set_title("Bytes a parameter")
    _break_names(ax, [way.name for way in WAYS])


def _times(ax: Any, trainings: Sequence[Training], timed: Timed) -> None:
    colors = {it.way.name: COLORS[it.way] for it in trainings}
    for name, each in timed.seconds.items():
        low, middle, high = (1e3 * it for it in quantiles(each, n=4))
        color = colors.get(name, COLORS[FP32])
        ax.bar(name, middle, color=color, alpha=0.8, width=0.6, yerr=[[middle - low], [high - middle]], capsize=3)
        ax.text(name, high, f"{1e3 * median(each):.1f}", ha="center", va="bottom", fontweight="bold")
    doubt = "\nbut other programs were at work" * ("busy" in timed.beside_torch(OURS).doubts())
    ax.set_title(f"Unscale, clip and step: ms, with quartiles{doubt}")
    _break_names(ax, list(timed.seconds))


def _break_names(ax: Any, names: Sequence[str]) -> None:
    ax.set_xticks(range(len(names)), [name.replace(", ", ",\n").replace("torch ", "torch\n") for name in names])


def _scales(ax: Any, trainings: Sequence[Training], _: Timed) -> None:
    scales = next(it.scales for it in trainings if it.way == OURS)
    ax.step(range(1, len(scales) + 1), scales, where="post", color=COLORS[OURS])
    ax.set_yscale("log", base=2)
    ax.margins(y=0.4)  # room for the note
    ax.set_title("Loss scale of mpkernels")
    ax.set_xlabel("step")
    skips = [i for i in range(1, len(scales)) if scales[i] < scales[i - 1]]
    for i in skips:
        note = f"step {i + 1} is skipped:\nan inf in {OVERFLOWING}"
        arrow = {"arrowstyle": "->", "color": COLORS[BF16]}
        ax.annotate(note, (i + 1, scales[i]), (0.03, 0.85), textcoords="axes fraction", arrowprops=arrow)
