"""Chooses the tests of a run without ``--all``: those that find most in their time.

The run leaves out tests marked ``exhaustive``, and combinations of parameters. Of each test function, it keeps enough
combinations that every two values of two parameters occur together; if the function is marked ``each_value_once``, that
every value occurs. If the command line names a file or a test, all of it runs."""

import heapq
import itertools
from collections import Counter, defaultdict
from pathlib import Path

import pytest

LEFT_OUT = pytest.StashKey[Counter[str]]()  # how many tests of each folder are left out
GOLDEN = (5**0.5 - 1) / 2
EXHAUSTIVE, EACH_ONCE, BEGINS_FIRST = "exhaustive", "each_value_once", "begins_first"


def add_option(parser):
    parser.addoption("--all", action="store_true", help="run all tests, also those that a quick run leaves out")


def is_quick(config):
    """Return whether all files are asked for, and nobody has asked for all of their tests."""
    places = {Path(config.invocation_params.dir, it).resolve() for it in config.args}
    return not config.getoption("--all") and places == {config.rootpath / it for it in config.getini("testpaths")}


def pytest_collection_modifyitems(config, items):
    if is_quick(config):
        _leave_out(config, items)
    if hasattr(config, "workerinput"):
        _order_files(items)


def pytest_sessionstart(session):
    session.config.option.loadscopereorder = False  # pytest-xdist's order, in which long files with few tests come last


def _order_files(items):
    """Sort marked files to the front, then files with many tests, so that no worker begins a long file when the others
    are done."""
    counts = Counter(_file(it) for it in items)
    items.sort(key=lambda it: (it.get_closest_marker(BEGINS_FIRST) is None, -counts[_file(it)]))


def _file(item):
    return item.nodeid.partition("::")[0]


def _leave_out(config, items):
    by_function = defaultdict(list)
    for it in items:
        if it.get_closest_marker(EXHAUSTIVE) is None:
            by_function[it.parent.nodeid, getattr(it, "originalname", it.name), _device(it)].append(it)
    kept = {it for tests in by_function.values() for it in covering(_group_size(tests[0]), tests, _values)}
    left_out = [it for it in items if it not in kept]
    config.stash[LEFT_OUT] = Counter(_folder(it.nodeid) for it in left_out)
    config.hook.pytest_deselected(items=left_out)
    items[:] = [it for it in items if it in kept]


def _device(item):
    """Return the device of a test's target. Each device's tests are chosen by themselves: a device may be missing."""
    target = item.callspec.params.get("target") if hasattr(item, "callspec") else None
    return getattr(target, "device", None)


def _values(item):
    """Return which value each of a test's parameters has. Tests that share one have the same object, or equal text."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return {name: value if isinstance(value, str) else id(value) for name, value in params.items()}


def _group_size(item):
    return 2 if item.get_closest_marker(EACH_ONCE) is None else 1


def covering(count, combinations, values):
    """Return enough combinations that any ``count`` values which occur together in a combination also occur together in
    a returned one. ``values(combination)`` returns its values by parameter."""
    sorted_values = [sorted(values(it).items()) for it in combinations]
    groups = [set(itertools.combinations(it, min(count, len(it)))) for it in sorted_values]
    missing, kept = set().union(*groups), set()
    # The combination that adds most missing groups comes next. Multiples of the golden ratio order those that add as
    # many, so that successive ones lie far apart: neighbours would all have the first parameter's first value.
    heap = [(-len(group), place * GOLDEN % 1, place) for place, group in enumerate(groups)]
    heapq.heapify(heap)
    while missing:
        known, order, place = heapq.heappop(heap)
        if (now := len(groups[place] & missing)) == -known:
            kept.add(place)
            missing -= groups[place]
        else:
            heapq.heappush(heap, (-now, order, place))
    return [it for place, it in enumerate(combinations) if place in kept]


def _folder(nodeid):
    return nodeid.partition("::")[0].rpartition("/")[0]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput[EXHAUSTIVE] = dict(session.config.stash.get(LEFT_OUT, {}))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Take a worker's counts: all workers collect, and leave out, the same tests."""
    node.config.stash[LEFT_OUT] = Counter(getattr(node, "workeroutput", {}).get(EXHAUSTIVE, {}))


def lines_on(config):
    left_out = config.stash.get(LEFT_OUT, Counter())
    where = ", ".join(f"{count} in {folder}" for folder, count in left_out.most_common())
    return [f"{left_out.total()} more with --all: {where}"] if left_out else []
