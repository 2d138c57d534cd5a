"""``--require`` lets no run begin that would skip a library, or all tests in several processes."""

from types import SimpleNamespace

import pytest

from tests import conftest, libraries

PLUGINS = SimpleNamespace(register=lambda plugin: None, get_plugin=lambda name: None)
CONFIG = SimpleNamespace(getoption=lambda _: "integrations", pluginmanager=PLUGINS)


def test_a_library_that_is_missing_ends_the_run(monkeypatch):
    monkeypatch.setattr(libraries, "NAMES", ["pytest", "no_such_library"])
    with pytest.raises(pytest.UsageError, match=r"^--require: no_such_library can't run here: No module named"):
        conftest.pytest_configure(CONFIG)
    monkeypatch.setattr(libraries, "NAMES", ["pytest"])
    conftest.pytest_configure(CONFIG)


def test_a_torch_without_gloo_ends_the_run(monkeypatch):
    monkeypatch.setattr(conftest, "why_no_gloo", lambda: "torch was built without it")
    with pytest.raises(pytest.UsageError, match=r"^--require: gloo can't run here: torch was built without it$"):
        conftest.pytest_configure(SimpleNamespace(getoption=lambda _: "cpu-reference"))


def test_without_the_option_the_module_is_skipped(monkeypatch):
    monkeypatch.setattr(libraries, "NAMES", ["no_such_library"])
    with pytest.raises(pytest.skip.Exception, match="needs the extra integrations: No module named"):
        libraries.need()


def test_the_libraries_are_those_of_the_extra():
    assert {"transformers", "accelerate", "lightning", "peft", "torchao", "diffusers", "liger_kernel"} <= set(
        libraries.NAMES
    )
