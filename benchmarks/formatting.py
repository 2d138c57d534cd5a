"""Writes tables in Markdown, and the sizes and speeds in their cells."""

from collections.abc import Iterable, Iterator
from statistics import median

from benchmarks.raw_samples import Session
from mpkernels.bench.results import Result


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield "|---" * len([*header]) + "|"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def size(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1e3
    return f"{count:.3g} GB"


def a_second(result: Result, amount: int) -> float:
    return amount / median(result.ours_us) * 1e6


def speed(result: Result) -> str:
    if result.moved:
        return f"{a_second(result, result.moved) / 1e9:.1f} GB/s"
    return f"{a_second(result, result.flops) / 1e12:.3g} TFLOP/s" if result.flops else ""


def share(result: Result, session: Session) -> str:
    """Return the share of the machine's own copy or matrix product that ours reaches."""
    if result.moved and (copy := session.copy_speeds.get(result.place)):
        return f"{a_second(result, result.moved) / copy:.0%}"
    if result.flops and (gemm := session.gemm_speeds.get(f"{result.place} {result.dtype}")):
        return f"{a_second(result, result.flops) / gemm:.0%}"
    return ""
