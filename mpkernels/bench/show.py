"""Results for people, in plain text; in colours and with a progress bar where rich is installed."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

from mpkernels.bench.pairs import BUSY, WIDE, Interval
from mpkernels.bench.results import Result, Run

PLAIN = "plain output: rich is not installed (pip install 'mpkernels[bench]')"
COLUMNS = "{:58} {:>9} {:>9} {:>11} {:>8}  {:26} {}"
HEADER = COLUMNS.format("", "ours", "theirs", "speed", "of best", "x torch [95 % interval]", "torch is 6 wide")
NOTE = f"""\
wide: the interval spans more than {WIDE:.0%}. busy: threads waited for a core more than {BUSY:.0%} of the time.
Measure both again before you believe them."""
TORCHS_WIDTH, MOST_WIDTH = 6, 30

Say = Callable[[str, str], None]  # a line and its colour


def time(microseconds: float) -> str:
    for unit in ("us", "ms"):
        if microseconds < 999.5:
            return f"{microseconds:.3g} {unit}"
        microseconds /= 1e3
    return f"{microseconds:.3g} s"


def size(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1e3
    return f"{count:.3g} GB"


def speed(result: Result) -> str:
    if result.moved:
        return f"{result.bytes_a_second / 1e9:.1f} GB/s"
    return f"{result.flops_a_second / 1e12:.3g} TFLOP/s"


def share(result: Result, run: Run) -> str:
    """Of the machine's own copy or matrix product."""
    if result.moved and (copy := run.copy_speeds.get(result.place)):
        return f"{result.bytes_a_second / copy:.0%}"
    if result.flops and (gemm := run.gemm_speeds.get(f"{result.place} {result.dtype}")):
        return f"{result.flops_a_second / gemm:.0%}"
    return ""


def verdict(result: Result) -> str:
    """Where the interval holds 1, nobody is ahead."""
    low, _, high = result.ratio
    return "faster" if low > 1 else "slower" if high < 1 else "even"


def bar(ratio: float) -> str:
    cells = min(MOST_WIDTH, max(1, round(ratio * TORCHS_WIDTH)))
    drawn = "█" * cells + "·" * (TORCHS_WIDTH - cells)
    return drawn + "…" * (ratio * TORCHS_WIDTH > MOST_WIDTH)


def line(result: Result, run: Run) -> str:
    low, middle, high = result.ratio
    ratio = f"{middle:.2f} [{low:.2f}, {high:.2f}] {verdict(result)}"
    ours, theirs = time(median(result.ours_us)), time(median(result.torch_us))
    drawn = " ".join([bar(middle), *result.doubts])
    return COLUMNS.format(result.name, ours, theirs, speed(result), share(result, run), ratio, drawn)


def colour(result: Result) -> str:
    return {"faster": "green", "slower": "red", "even": ""}[verdict(result)]


def summary(run: Run) -> str:
    words = [verdict(result) for result in run.results]
    counted = ", ".join(f"{words.count(word)} {word}" for word in ("faster", "even", "slower"))
    memory = [
        f"{result.name}: {size(result.counts['ours']['peak memory'])}, theirs "
        f"{size(result.counts['theirs']['peak memory'])}"
        for result in run.results
        if result.counts
    ]
    lines = [f"{len(words)} pairs on {run.device}: {counted}"]
    lines += ["peak memory", *(f"  {it}" for it in memory)] * bool(memory)
    lines += [f"left out: {name}: {reason}" for name, reason in run.skipped.items()]
    lines += [NOTE] * any(result.doubts for result in run.results)
    return "\n".join([*lines, f"{headline(run)}."])


def headline(run: Run) -> str:
    """What the run says, in one sentence."""
    first = next((it for it in run.results if it.op == "step" and it.counts and not it.variant), None)
    if first is None:
        words, doubtful = [verdict(it) for it in run.results], sum(bool(it.doubts) for it in run.results)
        counted = f"{words.count('faster')} of {len(words)} cases are faster than torch, {words.count('slower')} slower"
        return counted + f"; {doubtful} of them are in doubt" * bool(doubtful)
    what = f"AdamW's unscaled, clipped step in {first.dtype}"
    memory = first.counts["ours"]["peak memory"] / first.counts["theirs"]["peak memory"]
    share = f"in {memory:.0%} of its memory"
    if (times := figure(first.ratio, first.doubts)) is None:
        return f"{what} runs {share}; how fast beside {first.baseline}'s can't be told, for other programs were at work"
    wide = "; the samples are wide" * bool(first.doubts)
    return f"{what} is {f'{times} times ' * bool(times)}as fast as {first.baseline}'s, {share}{wide}"


def figure(ratio: Interval, doubts: list[str]) -> str | None:
    """Return the ratio as a sentence may have it: empty where nobody is ahead, None where other programs were at work,
    for then even the interval can't be believed."""
    if "busy" in doubts:
        return None
    if ratio.low <= 1 <= ratio.high:
        return ""
    if not doubts:
        return f"{ratio.median:.2f}"
    return f"at least {ratio.low:.2f}" if ratio.low > 1 else f"at most {ratio.high:.2f}"


def changes(old: Run, new: Run) -> str:
    """What both have measured."""
    before = {result.name: result.ratio for result in old.results}
    lines = []
    for result in new.results:
        if result.name in before:
            was, now = before[result.name], result.ratio
            apart = "  changed" if now.low > was.high or now.high < was.low else ""
            lines.append(f"{result.name:58} {was.median:.2f} -> {now.median:.2f} x torch{apart}")
    return "\n".join([f"beside {old.date}, mpkernels {old.machine.get('mpkernels')}:", *lines])


@contextmanager
def progress(total: int) -> Iterator[tuple[Say, Callable[[str], None]]]:
    """How to say a line, and how to say what is being measured now."""
    if importlib.util.find_spec("rich") is None:
        yield from _plain(total)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    wide = None if sys.stdout.isatty() else 200
    console = Console(highlight=False, width=wide)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as live:
        task = live.add_task("", total=total + 1)

        def measuring(name: str) -> None:
            live.update(task, description=name, advance=1)

        yield lambda text, style: console.print(text, style=style or None, markup=False, soft_wrap=True), measuring


def _plain(total: int) -> Iterator[tuple[Say, Callable[[str], None]]]:
    print(PLAIN)
    done = iter(range(1, total + 1))

    def measuring(name: str) -> None:
        print(f"{next(done)}/{total} {name}", file=sys.stderr, flush=True)

    yield lambda text, style: print(text, flush=True), measuring
