"""Shows results as text."""

from statistics import median

from mpkernels.bench.pairs import BUSY, WIDE, Interval
from mpkernels.bench.results import Result, Session

COLUMNS = "{:58} {:>9} {:>9}  {:26} {}"
HEADER = COLUMNS.format("", "ours", "theirs", "x torch [95 % interval]", "").rstrip()
DOUBTS = {
    "wide": f"the 95 % interval of the ratio spans more than {WIDE:.0%} of it",
    "busy": f"threads waited for a core more than {BUSY:.0%} of the time",
}
NOTE = "\n".join([*(f"{word}: {meaning}." for word, meaning in DOUBTS.items()), "Measure such cases again."])


def time(microseconds: float) -> str:
    for unit in ("us", "ms"):
        if microseconds < 999.5:
            return f"{microseconds:.3g} {unit}"
        microseconds /= 1e3
    return f"{microseconds:.3g} s"


def verdict(result: Result) -> str:
    """Return who is faster; "even" if the interval holds 1."""
    low, _, high = result.ratio
    return "faster" if low > 1 else "slower" if high < 1 else "even"


def line(result: Result) -> str:
    low, middle, high = result.ratio
    ratio = f"{middle:.2f} [{low:.2f}, {high:.2f}] {'in doubt' if result.doubts else verdict(result)}"
    seconds = (time(median(samples)) for samples in (result.ours_us, result.torch_us))
    return COLUMNS.format(result.name, *seconds, ratio, " ".join(result.doubts)).rstrip()


def tally(found: list[Result]) -> str:
    words = [verdict(result) for result in found]
    return ", ".join(f"{words.count(word)} {word}" for word in ("faster", "even", "slower"))


def summary(session: Session) -> str:
    told = [result for result in session.results if not result.doubts]
    doubtful = len(session.results) - len(told)
    in_doubt = f", {doubtful} in doubt" * bool(doubtful)
    lines = [f"{len(session.results)} pairs on {session.device}: {tally(told)}{in_doubt}"]
    lines += [f"left out: {name}: {reason}" for name, reason in session.skipped.items()]
    lines += [NOTE] * bool(doubtful)
    step = next((it for it in session.results if it.op == "step" and not it.variant), None)
    return "\n".join([*lines, *([f"{headline(step)}."] if step else [])])


def headline(first: Result) -> str:
    """Return one sentence on a step of the optimizer. If the samples are in doubt, it says so instead of a figure."""
    what = f"AdamW's step in {first.dtype}, with clipping,"
    if first.doubts:
        return f"{busy(first.doubts)}; so it can't be told how fast {what} is beside {first.baseline}'s"
    return f"{what} is {as_fast(first.ratio)} as {first.baseline}'s"


def busy(doubts: list[str]) -> str:
    """Return why the samples allow no verdict."""
    return f"this machine was busy: {' and '.join(DOUBTS[doubt] for doubt in doubts)}"


def as_fast(ratio: Interval) -> str:
    """Return the ratio as part of a sentence, without a number if neither side is faster."""
    return "as fast" if ratio.low <= 1 <= ratio.high else f"{ratio.median:.2f} times as fast"
