"""What is said of the trainings: while they run, and at the end."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from statistics import median

import torch

from mpkernels.bench.show import figure
from mpkernels.demo.optimizer_step import TORCH_FUSED, Timed
from mpkernels.demo.training import BF16, FP32, OURS, OURS_8_BIT, Training, Way

HEAD = ("", "step", "held-out loss", "loss scale", "bytes a parameter")
CLEARLY_FASTER = 1.4


def missing(module: str, what: str) -> bool:
    if find_spec(module) is not None:
        return False
    print(f"No {what}: {module} is not installed (pip install 'mpkernels[demo]').")
    return True


def place(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} CPU threads"


def introduction(device: torch.device, corpus: int, parameters: int) -> str:
    return (
        f"A transformer of {parameters / 1e6:.1f} M parameters learns Python from {corpus / 1e6:.1f} MB of sources\n"
        f"of the standard library, in four ways side by side, on {place(device)}. First, off the clock, each way\n"
        "warms up."
    )


def plan(steps: int, seconds: float) -> str:
    return f"{steps} more steps of each follow, about {seconds:.0f} seconds in all."


def row(it: Training) -> tuple[str, ...]:
    step, loss = it.held_out[-1]
    scale = f"{it.scales[-1]:.0f}" if it.way.has_scaler else "none"
    return it.way.name, str(step), f"{loss:.3f}", scale, f"{sum(it.bytes_per_parameter().values()):.1f}"


def plain(rows: Sequence[Sequence[str]]) -> str:
    """In columns that keep their place from one call to the next."""
    widths = [len(OURS_8_BIT.name), *(max(9, len(head)) for head in HEAD[1:])]
    return "\n".join("  ".join(map(str.rjust, cells, widths)) for cells in rows)


@contextmanager
def live(steps: int) -> Iterator[Callable[[Sequence[Training]], None]]:
    """A table that is redrawn in a terminal that rich can draw in; else lines."""
    if missing("rich", "live table") or not sys.stdout.isatty():
        yield lambda trainings: print(plain([HEAD, *map(row, trainings)]), flush=True)
        return
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    with Live(refresh_per_second=4) as screen:

        def show(trainings: Sequence[Training]) -> None:
            bar = ProgressBar(steps, trainings[0].held_out[-1][0], width=60)
            table = Table(*HEAD, caption=bar)  # type: ignore[arg-type]
            for it in trainings:
                table.add_row(*row(it))
            screen.update(table)

        yield show


def figures(trainings: Sequence[Training], timed: Timed) -> str:
    """Three figures, and how to see each again."""
    of_way = {it.way: it for it in trainings}
    sizes = {way: sum(it.bytes_per_parameter().values()) for way, it in of_way.items()}
    smaller, smaller_8 = (sizes[way] / sizes[FP32] for way in (OURS, OURS_8_BIT))
    return f"""
1. {_speed(timed, smaller)}
   python -m mpkernels bench --only 'step*moments*'
2. Weights, grads and states take {smaller:.2f} of torch.amp's bytes ({smaller_8:.2f} with 8-bit moments).
   pytest tests/optim/test_step_costs.py
3. {_losses({way: it.held_out[-1][1] for way, it in of_way.items()})}
   python -m mpkernels demo"""


def _speed(timed: Timed, smaller: float) -> str:
    """Say how much faster the step is, as far as the samples tell."""
    samples = timed.beside_torch(OURS)
    ratio, doubts = samples.ratio(), samples.doubts()
    times, times_8 = (figure(it.ratio(), it.doubts()) for it in map(timed.beside_torch, (OURS, OURS_8_BIT)))
    if times is None or times_8 is None:
        return (
            "How fast the optimizer's step is beside torch's fused one can't be told: other programs were at work.\n"
            f"   Threads waited for a core {timed.waited:.0%} of the time."
        )
    ours, torchs = (1e3 * median(timed.seconds[name]) for name in (OURS.name, TORCH_FUSED))
    wide = " The samples are wide." * bool(doubts)
    return (
        f"The optimizer's step is {f'{times} times ' * bool(times)}as fast as torch's fused one "
        f"({times_8 or 'as fast'} with 8-bit moments):\n"
        f"   {ours:.1f} ms, torch takes {torchs:.1f}, with unscaling and clipping.{wide}"
        f"{_why_so_little(ratio.median, smaller)}"
    )


def _losses(of_way: dict[Way, float]) -> str:
    ours, ours_8, fp32, bf16 = (of_way[way] for way in (OURS, OURS_8_BIT, FP32, BF16))
    why = "where small updates are rounded away" if bf16 > ours else "which so few steps don't hurt yet"
    return (
        f"The held-out loss is {ours:.3f} ({ours_8:.3f} with 8-bit moments). With fp32 weights it is {fp32:.3f},\n"
        f"   with bf16 weights and torch's AdamW, {why}, {bf16:.3f}."
    )


def _why_so_little(faster: float, share: float) -> str:
    if faster >= CLEARLY_FASTER:
        return ""
    return (
        f"\n   By its bytes it would be {1 / share:.1f} times as fast or more. Here memory is not what limits it: the\n"
        "   processor computes too slowly, other programs use it, or the parameters fit its cache."
    )
