"""A pytest plugin that selects the tests for the stand-in. Tests that can't run there are listed here, with reasons."""

import fnmatch
import os

import pytest

HUGE = "takes 8 GiB, and the stand-in's devices have 6"
# Each of these tests fails. If one passes, it must be removed from here.
FAILS = {
    "tests/ops/test_huge.py::*matri*cuda-native*": HUGE,
    "tests/ops/test_huge.py::*matri*cuda-triton*": HUGE,
    "tests/ops/test_cuda_graphs.py::*cuda-triton*": "an interpreted kernel runs at once, not as a capture's work",
}
# Fails or passes by chance: the interpreted kernel may run before torch's copy, which is still work of a stream.
LEFT_OUT = "tests/ops/test_planted_bugs.py::*copy_on_write*cuda-triton*"
ROOMS = ("tests/cuda/", "tests/proof/standin/")  # run whatever their names are


def pytest_addoption(parser):
    parser.addoption("--on", required=True, help="the target whose tests run")
    parser.addoption("--part", default="0/1", help="i/n: every n-th test only, from the i-th on")


def pytest_load_initial_conftests(early_config):
    if early_config.known_args_namespace.on == "cuda-triton":
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported
        # numpy warns of every inf, and tests can't tell it in autograd's threads not to.
        early_config.addinivalue_line("filterwarnings", "ignore:.* encountered in:RuntimeWarning")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    target = config.getoption("--on")
    chosen = [it for it in items if target in it.nodeid or it.nodeid.startswith(ROOMS)]
    chosen = [it for it in chosen if not fnmatch.fnmatchcase(it.nodeid, LEFT_OUT)]
    for pattern, reason in FAILS.items():
        found = [it for it in chosen if fnmatch.fnmatchcase(it.nodeid, pattern)]
        if not found and config.args == ["tests"] and target in pattern:
            raise pytest.UsageError(f"stand-in: no test is called {pattern}, which is said to fail here")
        for it in found:
            it.add_marker(pytest.mark.xfail(reason=reason, strict=True))
    first, step = map(int, config.getoption("--part").split("/"))
    kept = chosen[first::step]
    config.hook.pytest_deselected(items=[it for it in items if it not in set(kept)])
    items[:] = kept
