from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import machine, report
from benchmarks.pairs import measure
from benchmarks.settings import LAYER_SETTINGS, SETTINGS

ROWS = pytest.StashKey[list[report.Row]]()


class Replay:
    """A clock for pytest-benchmark, which only times what it calls itself: it replays samples taken before."""

    time = 0.0

    def now(self) -> float:
        return self.time

    def of(self, samples: list[float]) -> Callable[[], None]:
        durations = iter(samples)

        def pass_time() -> None:
            self.time += next(durations)

        return pass_time


replay = Replay()


def pytest_addoption(parser):
    parser.addoption("--results", type=Path, metavar="PATH.json", help="write the raw samples and the machine")


def pytest_configure(config):
    config.addinivalue_line("python_files", "bench_*.py")
    config.addinivalue_line("markers", "settings(part, ...): only where one of these is part of the setting's name")
    config.addinivalue_line("markers", "layers: at the settings of layers, not of lists of tensors")
    config.stash[ROWS] = []
    path = config.getoption("--results", None)
    if path and not path.parent.is_dir():
        raise pytest.UsageError(f"--results: no directory {path.parent}")


def pytest_generate_tests(metafunc):
    if "setting" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("settings")
        parts = marker.args if marker else ("",)
        settings = LAYER_SETTINGS if metafunc.definition.get_closest_marker("layers") else SETTINGS
        names = [name for name in settings if any(part in name for part in parts)]
        metafunc.parametrize("setting", names, indirect=True)


def pytest_collection_modifyitems(items):
    for item in items:
        if "compare" in item.fixturenames:
            item.add_marker(pytest.mark.benchmark(timer=replay.now))


@pytest.fixture
def setting(request):
    return (SETTINGS | LAYER_SETTINGS)[request.param]


@pytest.fixture
def device(setting):
    threads = torch.get_num_threads()
    torch.set_num_threads(setting.place.threads)
    yield setting.place.device
    torch.set_num_threads(threads)


@pytest.fixture
def grads(setting, device):
    return setting.tensors()


@pytest.fixture
def compare(benchmark, setting, device, pytestconfig):
    """Measures a pair and hands it on: ours as the benchmark, torch's beside it."""

    def compare(pair):
        seconds = float(pytestconfig.getoption("benchmark_max_time")) if benchmark.enabled else 0
        samples = measure(pair, device, setting.case.host_cost, seconds)
        row = report.Row(pair.without_data(), setting, samples, machine.copy_speed(device))
        pytestconfig.stash[ROWS].append(row)
        benchmark.group = f"{pair.op} {setting.place}"
        benchmark.extra_info.update(row.extra_info())
        benchmark.pedantic(replay.of(samples.ours), rounds=len(samples.ours))

    return compare


@pytest.hookimpl(trylast=True)  # below pytest-benchmark's tables
def pytest_terminal_summary(terminalreporter, config):
    rows = config.stash[ROWS]
    if not rows:
        return
    terminalreporter.section("beside torch")
    terminalreporter.write_line(report.table(rows))
    if path := config.getoption("--results"):
        report.write(path, rows)
        terminalreporter.write_line(f"raw samples: {path}")
