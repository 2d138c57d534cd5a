"""Results as text."""

from statistics import median

from mpkernels.bench.pairs import BUSY, WIDE, Interval
from mpkernels.bench.results import Result, Session

COLUMNS = "{:58} {:>9} {:>9}  {:26} {}"
HEADER = COLUMNS.format("", "ours", "theirs", "x torch [95 % interval]", "torch is 6 wide")
NOTE = f"""\
wide: the interval spans more than {WIDE:.0%}. busy: threads waited for a core more than {BUSY:.0%} of the time.
Measure both again before you believe them."""
TORCHS_WIDTH, MOST_WIDTH = 6, 30


def time(microseconds: float) -> str:
    for unit in ("us", "ms"):
        if microseconds < 999.5:
            return f"{microseconds:.3g} {unit}"
        microseconds /= 1e3
    return f"{microseconds:.3g} s"


def verdict(result: Result) -> str:
    """Return who is faster; even where the interval holds 1."""
    low, _, high = result.ratio
    return "faster" if low > 1 else "slower" if high < 1 else "even"


def bar(ratio: float) -> str:
    cells = min(MOST_WIDTH, max(1, round(ratio * TORCHS_WIDTH)))
    drawn = "█" * cells + "·" * (TORCHS_WIDTH - cells)
    return drawn + "…" * (ratio * TORCHS_WIDTH > MOST_WIDTH)


def line(result: Result) -> str:
    low, middle, high = result.ratio
    ratio = f"{middle:.2f} [{low:.2f}, {high:.2f}] {verdict(result)}"
    drawn = " ".join([bar(middle), *result.doubts])
    return COLUMNS.format(result.name, time(median(result.ours_us)), time(median(result.torch_us)), ratio, drawn)


def tally(found: list[Result]) -> str:
    words = [verdict(result) for result in found]
    return ", ".join(f"{words.count(word)} {word}" for word in ("faster", "even", "slower"))


def summary(session: Session) -> str:
    lines = [f"{len(session.results)} pairs on {session.device}: {tally(session.results)}"]
    lines += [f"left out: {name}: {reason}" for name, reason in session.skipped.items()]
    lines += [NOTE] * any(result.doubts for result in session.results)
    return "\n".join([*lines, f"{headline(session)}."])


def headline(session: Session) -> str:
    """Say in one sentence what was measured: of the optimizer's step, if that is among it."""
    first = next((it for it in session.results if it.op == "step" and not it.variant), None)
    if first is None:
        words, doubtful = [verdict(it) for it in session.results], sum(bool(it.doubts) for it in session.results)
        counted = f"{words.count('faster')} of {len(words)} cases are faster than torch, {words.count('slower')} slower"
        return counted + f"; {doubtful} of them are in doubt" * bool(doubtful)
    what = f"AdamW's step in {first.dtype}, with clipping"
    if (times := figure(first.ratio, first.doubts)) is None:
        return f"how fast {what}, is beside {first.baseline}'s can't be told: other programs were at work"
    wide = "; the samples are wide" * bool(first.doubts)
    return f"{what}, is {f'{times} times ' * bool(times)}as fast as {first.baseline}'s{wide}"


def figure(ratio: Interval, doubts: list[str]) -> str | None:
    """Return the ratio for a sentence: empty where nobody is ahead, None where other programs were at work, because
    then even the interval can't be believed."""
    if "busy" in doubts:
        return None
    if ratio.low <= 1 <= ratio.high:
        return ""
    if not doubts:
        return f"{ratio.median:.2f}"
    return f"at least {ratio.low:.2f}" if ratio.low > 1 else f"at most {ratio.high:.2f}"
