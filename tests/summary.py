"""Prints how long the tests will take, what else takes long before them, and, after them, which kernels they have
tested, and why others were skipped."""

import threading
import time
from collections import Counter, defaultdict

from tests import quick

TARGET = "target"  # a property of each test that runs a target's kernels
SPEED = "speed"  # a property of tests that measure, printed after the tests
OUTCOMES = ("passed", "failed", "error", "skipped")


def pytest_report_header(config):
    if quick.is_quick(config):
        return "tests of every kernel: some 6 minutes on two quiet cores; several times as long on a busy machine"
    if config.getoption("--all"):
        return "all tests: some 40 minutes on two quiet cores; several times as long on a busy machine"
    return None


def count_up(what, say, seconds=20):
    """Say every so many seconds for how long ``what`` has gone on, until the event that is returned is set."""
    ended, start = threading.Event(), time.monotonic()

    def count():
        while not ended.wait(seconds):
            say(f"tests: {what}, {time.monotonic() - start:.0f} s so far")

    threading.Thread(target=count, daemon=True).start()
    return ended


class CollectionTime:
    """Counts up until the first test begins: pytest-xdist's workers say nothing while they collect."""

    def __init__(self, config):
        find = config.pluginmanager.get_plugin  # pytest makes the reporter later
        self.ended = count_up("each process collects them", lambda text: find("terminalreporter").write_line(text))

    def pytest_runtest_logstart(self):
        self.ended.set()

    pytest_sessionfinish = pytest_runtest_logstart


def pytest_terminal_summary(terminalreporter, config):
    reports = [(outcome, it) for outcome in OUTCOMES for it in terminalreporter.stats.get(outcome, [])]
    if lines := [*lines_of(reports), *quick.lines_on(config)]:
        terminalreporter.section("which kernels these tests ran")
        for line in lines:
            terminalreporter.write_line(line)
    if speeds := [text for _, report in reports for text in _properties(report, SPEED)]:
        beside = ", while other tests ran" if config.getoption("numprocesses", None) else ""
        terminalreporter.section(f"how fast each op is, by one short measurement{beside}")
        for text in sorted(speeds):
            terminalreporter.write_line(text)


def _properties(report, name):
    return [value for key, value in getattr(report, "user_properties", ()) if key == name]


def lines_of(reports):
    """Return a line for each target whose tests were asked for, from pytest's reports by their outcome."""
    counts, reasons = defaultdict(Counter), {}
    for outcome, report in reports:
        for name in {*_properties(report, TARGET)}:
            counts[name][outcome] += 1
            if outcome == "skipped":
                reasons.setdefault(name, _reason(report))
    lines = [_line(name, counts[name], reasons.get(name)) for name in sorted(counts)]
    if lines and not any(name.startswith("cuda") and _ran(outcomes) for name, outcomes in counts.items()):
        lines.append("No kernel ran on a GPU; docs/proof.md says what stands in for one.")
    skips = [_reason(report) for outcome, report in reports if outcome == "skipped" and not _missing(report, counts)]
    return lines + [f"{count} skipped: {reason}" for reason, count in Counter(skips).most_common()]


def _missing(report, counts):
    """Return whether a test was skipped because its target can't run here."""
    return any(not _ran(counts[name]) for name in _properties(report, TARGET))


def _line(name, counts, reason):
    if not _ran(counts):
        return f"{name:15} did not run here: {reason} ({counts['skipped']} tests)"
    return f"{name:15} {', '.join(f'{counts[outcome]} {outcome}' for outcome in OUTCOMES if counts[outcome])}"


def _ran(counts):
    return any(counts[outcome] for outcome in OUTCOMES if outcome != "skipped")


def _reason(report):
    """Return the reason of a skip, without the place that precedes it."""
    return report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else str(report.longrepr)
