from pathlib import Path

import pytest

from benchmarks import raw_samples
from benchmarks.cases import all_cases
from benchmarks.replayed_clock import replay
from mpkernels.bench import show

SESSION = pytest.StashKey[raw_samples.Session]()


def pytest_addoption(parser):
    parser.addoption("--results", type=Path, metavar="PATH.json", help="write the raw samples and the machine")


def pytest_configure(config):
    config.addinivalue_line("python_files", "bench_*.py")
    config.stash[SESSION] = raw_samples.Session()
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


def pytest_report_collectionfinish(config, items):
    """Say how long the cases take. To prepare one, and measure the machine beside it, takes as long at least."""
    cases = [it for it in items if "case" in getattr(it, "fixturenames", ()) and not it.callspec.params["case"].missing]
    if not cases or config.getoption("benchmark_disable"):
        return []
    minutes = 2 * len(cases) * float(config.getoption("benchmark_max_time")) / 60
    took = f"{len(cases)} cases, at least {max(round(minutes), 1)} minutes"
    return f"{took}, and several times as long on few cores or a busy machine; -k chooses some"


@pytest.fixture
def session(pytestconfig):
    return pytestconfig.stash[SESSION]


@pytest.fixture
def case(request, session):
    if reason := request.param.missing:
        session.skipped[request.param.name] = reason
        pytest.skip(reason)
    return request.param


@pytest.fixture
def seconds(benchmark, pytestconfig):
    return float(pytestconfig.getoption("benchmark_max_time")) if benchmark.enabled else 0.0


@pytest.hookimpl(trylast=True)  # prints below pytest-benchmark's tables
def pytest_terminal_summary(terminalreporter, config):
    session = config.stash[SESSION]
    if not session.results:
        return
    terminalreporter.section("beside torch")
    terminalreporter.write_line(show.HEADER)
    for result in session.results:
        terminalreporter.write_line(show.line(result))
    terminalreporter.write_line(show.summary(session))
    if path := config.getoption("--results"):
        raw_samples.write(path, session)
        terminalreporter.write_line(f"raw samples: {path}")
