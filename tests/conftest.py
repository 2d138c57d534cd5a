import gc
import os
import sys
import zlib
from functools import partial

import hypothesis
import pytest

os.environ["OMP_WAIT_POLICY"] = "passive"  # set before torch reads it; spinning threads slow others down

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it at its first import, and then interprets kernels

from mpkernels import selector
from tests import libraries, quick
from tests.processes import why_no_gloo
from tests.proof import interpreter
from tests.quick import (  # noqa: F401
    pytest_collection_modifyitems,
    pytest_sessionfinish,
    pytest_sessionstart,
    pytest_testnodedown,
)
from tests.summary import TARGET, CollectionTime, count_up, pytest_report_header, pytest_terminal_summary  # noqa: F401
from tests.targets import TARGETS, emulated_variable

EXTRA = "integrations"  # in pyproject.toml

interpreter.round_bf16_as_hardware_does()
interpreter.prefer_numbers_to_nan()
interpreter.poison_masked_lanes()
interpreter.check_alignment_hints()
interpreter.patch_the_language_once_a_launch()
interpreter.skip_unused_overflow_checks()
interpreter.remember_numpys_dtypes()
if os.environ.get("TRITON_INTERPRET") == "1":  # else the compiler's types would change
    interpreter.describe_each_type_once()
    interpreter.convert_other_types_only()
hypothesis.settings.register_profile("same examples in every run", derandomize=True, deadline=None)
hypothesis.settings.load_profile("same examples in every run")


def pytest_addoption(parser):
    quick.add_option(parser)
    parser.addoption(
        "--require",
        default="",
        metavar="TARGET,...",
        help=f"fail, don't skip, where one of these can't run here: {', '.join(TARGETS)}, {EXTRA}",
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """Return the number of workers for ``-n auto``: one more than cores, as a worker sometimes waits for processes. A
    worker takes a gigabyte or two, so there are 8 at most."""
    return min(os.cpu_count() + 1, 8)


def pytest_configure(config):
    if hasattr(config, "workerinput"):  # at least two threads, because tests check how threads share work
        torch.set_num_threads(max(2, torch.get_num_threads() // config.workerinput["workercount"]))
    required = set(filter(None, config.getoption("--require").split(",")))
    if unknown := required - TARGETS.keys() - {EXTRA}:
        known = ", ".join([*TARGETS, EXTRA])
        raise pytest.UsageError(f"--require: unknown target {', '.join(sorted(unknown))}; known: {known}")
    checks = {name: TARGETS[name].why_missing for name in sorted(required - {EXTRA})}
    if EXTRA in required:
        checks |= {name: partial(libraries.why_missing, name) for name in libraries.NAMES}
    if required:
        checks["gloo"] = why_no_gloo
    if "cpu-cuda" in required and not hasattr(config, "workerinput"):  # pytest prints nothing before the build
        print("tests: the CUDA kernels are compiled for the CPU now, in minutes, if they aren't yet", file=sys.stderr)
    checked = count_up("checks and compiles the kernels", partial(print, file=sys.stderr))
    missing = {name: why for name, why_missing in checks.items() if (why := why_missing())}
    checked.set()
    if missing:
        raise pytest.UsageError(
            "--require: " + "; ".join(f"{name} can't run here: {why}" for name, why in missing.items())
        )
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(CollectionTime(config))


def pytest_collection_finish():
    gc.freeze()  # what was imported and collected stays: each collection of garbage looked through it for half a second


def pytest_unconfigure():
    gc.unfreeze()  # else Triton's bindings print at the end what they take for leaks


def pytest_generate_tests(metafunc):
    if "target" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("kernels")
        targets = [it for it in TARGETS.values() if marker is None or it.kernel in marker.args]
        metafunc.parametrize("target", targets, ids=str, indirect=True)


@pytest.fixture(autouse=True)
def our_kernels():
    """Let our kernels compute all that they can, so that a test knows which kernel it tests. Tests of the selector's
    table switch this off."""
    selector.pin("native")


@pytest.fixture
def target(request):
    """Make every op run this target's kernel during the test."""
    request.node.user_properties.append((TARGET, str(request.param)))
    if why := request.param.why_missing():
        pytest.skip(why)
    if request.param.kernel == "cuda":
        _set_order_of_emulated_threads(request.node)
    with request.param.active():
        yield request.param


def _set_order_of_emulated_threads(test):
    """Seed the emulation's order of threads by the test's name, so that each run of a test has the same order."""
    seed = zlib.crc32(test.nodeid.encode())
    emulated_variable("emulation_seed").value = seed
    test.add_report_section("setup", "emulated CUDA", f"seed {seed}")


@pytest.fixture(params=["cpu-cuda"])  # a parameter, so that -k cuda finds these tests, too
def emulated(request):
    """Like ``target``, for tests of the emulation alone."""
    target = TARGETS[request.param]
    request.node.user_properties.append((TARGET, request.param))
    if why := target.why_missing():
        pytest.skip(why)
    _set_order_of_emulated_threads(request.node)
    with target.active():
        yield target
