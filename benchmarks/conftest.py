from pathlib import Path

import pytest

from benchmarks.replay import replay
from mpkernels.bench import results, show
from mpkernels.bench.cases import all_cases

RUN = pytest.StashKey[results.Run]()


def pytest_addoption(parser):
    parser.addoption("--results", type=Path, metavar="PATH.json", help="write the raw samples and the machine")


def pytest_configure(config):
    config.addinivalue_line("python_files", "bench_*.py")
    config.stash[RUN] = results.start()
    path = config.getoption("--results", None)
    if path and not path.parent.is_dir():
        raise pytest.UsageError(f"--results: no directory {path.parent}")


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", all_cases(), ids=lambda case: case.name.replace(" ", "-"), indirect=True)


def pytest_collection_modifyitems(items):
    for item in items:
        if "case" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.benchmark(timer=replay.now))


@pytest.fixture
def run(pytestconfig):
    return pytestconfig.stash[RUN]


@pytest.fixture
def case(request, run):
    if reason := request.param.missing:
        run.skipped[request.param.name] = reason
        pytest.skip(reason)
    return request.param


@pytest.fixture
def seconds(benchmark, pytestconfig):
    return float(pytestconfig.getoption("benchmark_max_time")) if benchmark.enabled else 0.0


@pytest.hookimpl(trylast=True)  # below pytest-benchmark's tables
def pytest_terminal_summary(terminalreporter, config):
    run = config.stash[RUN]
    if not run.results:
        return
    terminalreporter.section("beside torch")
    terminalreporter.write_line(show.HEADER)
    for result in run.results:
        terminalreporter.write_line(show.line(result, run))
    terminalreporter.write_line(show.summary(run))
    if path := config.getoption("--results"):
        results.write(path, run)
        terminalreporter.write_line(f"raw samples: {path}")
