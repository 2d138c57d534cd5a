"""Chooses the tests of a run without ``--all``: those that tell most for their time.

Left out are tests marked ``exhaustive``, and combinations of parameters: of each test function, as many run as it takes
for each two values of two parameters to meet; where it is marked ``each_value_once``, for each value to be there. Files
and tests that are named on the command line run whole."""

import heapq
import itertools
from collections import Counter, defaultdict
from pathlib import Path

import pytest

LEFT_OUT = pytest.StashKey[Counter[str]]()  # how many tests, by folder
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
    """Marked files come first, then those with many tests: no worker begins a long one when the others are done."""
    counts = Counter(_file(it) for it in items)
    items.sort(key=lambda it: (it.get_closest_marker(BEGINS_FIRST) is None, -counts[_file(it)]))


def _file(item):
    return item.nodeid.partition("::")[0]


def _leave_out(config, items):
    of_functions = defaultdict(list)
    for it in items:
        if it.get_closest_marker(EXHAUSTIVE) is None:
            of_functions[it.parent.nodeid, getattr(it, "originalname", it.name), _device(it)].append(it)
    kept = {it for alike in of_functions.values() for it in meeting(_how_many(alike[0]), alike, _values)}
    left_out = [it for it in items if it not in kept]
    config.stash[LEFT_OUT] = Counter(_folder(it.nodeid) for it in left_out)
    config.hook.pytest_deselected(items=left_out)
    items[:] = [it for it in items if it in kept]


def _device(item):
    """Tests of each device leave out nothing for those of another, which may not be there."""
    target = item.callspec.params.get("target") if hasattr(item, "callspec") else None
    return getattr(target, "device", None)


def _values(item):
    """Return which value each of a test's parameters has. Tests that share one have the same object, or equal text."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return {name: value if isinstance(value, str) else id(value) for name, value in params.items()}


def _how_many(item):
    return 2 if item.get_closest_marker(EACH_ONCE) is None else 1


def meeting(count, combinations, values):
    """Return enough of the combinations that any ``count`` values which meet in one of them meet in one that is kept.
    The one with most that are missing comes next. values: of a combination, by parameter."""
    its_values = [sorted(values(it).items()) for it in combinations]
    met = [set(itertools.combinations(it, min(count, len(it)))) for it in its_values]
    missing, kept = set().union(*met), set()
    # Among such with equally many, those that follow each other are far apart: else all would have one's first value.
    most = [(-len(its_own), place * GOLDEN % 1, place) for place, its_own in enumerate(met)]
    heapq.heapify(most)
    while missing:
        known, order, place = heapq.heappop(most)
        if (now := len(met[place] & missing)) == -known:
            kept.add(place)
            missing -= met[place]
        else:
            heapq.heappush(most, (-now, order, place))
    return [it for place, it in enumerate(combinations) if place in kept]


def _folder(nodeid):
    return nodeid.partition("::")[0].rpartition("/")[0]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput[EXHAUSTIVE] = dict(session.config.stash.get(LEFT_OUT, {}))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Each of pytest's workers has collected, and left out, the same."""
    node.config.stash[LEFT_OUT] = Counter(getattr(node, "workeroutput", {}).get(EXHAUSTIVE, {}))


def lines_on(config):
    left_out = config.stash.get(LEFT_OUT, Counter())
    where = ", ".join(f"{count} in {folder}" for folder, count in left_out.most_common())
    return [f"{left_out.total()} more with --all: {where}"] if left_out else []
