"""What is shown of two trainings: live, as a table, as a picture."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import torch

from mpkernels.demo.training import Training

Sides = Sequence[Training]
HEAD = ("", "step", "loss", "tokens/s", "ms/step", "loss scale", "skipped", "memory")
COLORS = ("#d1662f", "#2f6fd1")  # apart for the colour-blind, too
WINDOW = 10  # steps that a shown loss is the mean of
PROMPT = "def "


def missing(module: str, what: str) -> bool:
    if find_spec(module) is not None:
        return False
    print(f"No {what}: {module} is not installed (pip install 'mpkernels[demo]').")
    return True


def introduction(device: torch.device, corpus: int, parameters: int, precision: str, steps: int) -> str:
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    return (
        f"A transformer of {parameters / 1e6:.1f} M parameters learns Python from {corpus / 1e6:.1f} MB of the\n"
        f"standard library's sources: {steps} steps by torch.amp and by mpkernels in turns, {precision}, on {place}."
    )


def mean_loss(side: Training) -> float:
    recent = side.losses[-WINDOW:]
    return sum(recent) / len(recent)


def step_seconds(side: Training) -> list[float]:
    """Of each slice but the first, in which everything is done for the first time."""
    return [seconds / steps for steps, seconds in side.seconds[1:] or side.seconds]


def row(side: Training) -> tuple[str, ...]:
    seconds = median(step_seconds(side))
    scale = f"{side.scaler.get_scale():.0f}" if side.scaler.is_enabled() else "-"
    speed = f"{side.tokens / seconds:,.0f}", f"{1e3 * seconds:.1f}"
    memory = f"{side.meter.peak / 2**20:,.1f} MiB"
    return side.side, str(len(side.losses)), f"{mean_loss(side):.4f}", *speed, scale, str(side.skipped_steps), memory


def plain(rows: Sequence[Sequence[str]]) -> str:
    """In columns that keep their place from one call to the next."""
    widths = [max(9, *map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.rjust, cells, widths)) for cells in rows)


@contextmanager
def live(steps: int) -> Iterator[Callable[[Sides], None]]:
    """A table that is redrawn in a terminal that rich can draw in; else a line now and then."""
    if missing("rich", "live table") or not sys.stdout.isatty():
        yield _lines(max(steps // 10, 1))
        return
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    with Live(refresh_per_second=4) as screen:

        def show(sides: Sides) -> None:
            table = Table(*HEAD, caption=ProgressBar(steps, len(sides[0].losses), width=60))  # type: ignore[arg-type]
            for side in sides:
                table.add_row(*row(side))
            screen.update(table)

        yield show


def _lines(every: int) -> Callable[[Sides], None]:
    last = None

    def show(sides: Sides) -> None:
        nonlocal last
        done = len(sides[0].losses)
        if last is None or done - last >= every:
            rows = [*map(row, sides)]
            print(plain([HEAD, *rows] if last is None else rows), flush=True)
            last = done

    return show


def table(sides: Sides, held_out: Sequence[float]) -> str:
    rows = [(*row(side), f"{loss:.4f}") for side, loss in zip(sides, held_out, strict=True)]
    theirs, ours = (median(step_seconds(side)) for side in sides)
    memory = sides[1].meter.peak / sides[0].meter.peak
    shares = f"A step of mpkernels takes {ours / theirs:.2f} of torch.amp's time and {memory:.2f} of its memory."
    return f"\n{plain([(*HEAD, 'held-out loss'), *rows])}\n\n{shares}"


def plot(sides: Sides, path: Path) -> None:
    if missing("matplotlib", path.name):
        return
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    # A light ground of its own, so that a dark page changes nothing.
    with pyplot.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = pyplot.subplots(2, 2, figsize=(9, 6), facecolor="#fafafa", layout="constrained")
        for side, color, line in zip(sides, COLORS, ("-", "--"), strict=True):  # where they are equal, both are seen
            _draw(axes, side, {"color": color, "linestyle": line})
        for ax, (title, x, y) in zip(axes.flat, AXES, strict=True):
            ax.set_title(title)
            ax.set_xlabel(x)
            ax.set_ylabel(y)
            ax.set_facecolor("#fafafa")
        axes[1, 0].set_ylim(bottom=0)
        axes[0, 0].legend(frameon=False)
        figure.savefig(path, dpi=150)
        pyplot.close(figure)
    print(f"Drawn: {path}")


AXES = (
    ("Loss over time", "seconds of its own training", "loss"),
    ("Loss over steps", "step", "loss"),
    ("Time of a step", "step", "ms"),
    ("Memory at its peak", "", "MiB"),
)


def _draw(axes: Any, side: Training, style: dict[str, str]) -> None:
    ends = list(accumulate(steps for steps, _ in side.seconds))
    clock = list(accumulate(seconds for _, seconds in side.seconds))
    smooth = [sum(side.losses[max(end - WINDOW, 0) : end]) / min(end, WINDOW) for end in ends]
    axes[0, 0].plot(clock, smooth, **style, label=side.side)
    axes[0, 1].plot(ends, smooth, **style)
    axes[1, 0].plot(ends[-len(step_seconds(side)) :], [1e3 * each for each in step_seconds(side)], **style)
    axes[1, 1].bar(side.side, side.meter.peak / 2**20, color=style["color"], width=0.5)


def sample(side: Training, length: int = 240) -> str:
    with side.autocast():
        text = side.model.sample(PROMPT, length)
    return f"\nWhat the model of mpkernels writes after {PROMPT!r}:\n\n{text}"
