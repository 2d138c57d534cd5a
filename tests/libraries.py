"""The libraries of the extra ``integrations``, which tests of them need."""

import ast
import importlib
import re
import warnings

import pytest

from tests import ROOT

_TEXT = (ROOT / "pyproject.toml").read_text()
_REQUIRED = ast.literal_eval(re.search(r"^integrations = (\[.*\])$", _TEXT, re.MULTILINE)[1])
_IMPORTED_AS = {"torch_optimi": "optimi"}
NAMES = [_IMPORTED_AS.get(it, it) for it in (each.partition(";")[0].replace("-", "_") for each in _REQUIRED)]


def why_missing(name: str) -> str | None:
    """Return why the library can't be imported, or None."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(name)
    except ImportError as error:
        return str(error)
    return None


def reset_accelerate() -> None:
    """Reset the options that Accelerate keeps from the first Accelerator of a process."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def need() -> None:
    """Skip the calling module if a library is missing. With ``--require=integrations`` such a run doesn't begin."""
    for name in NAMES:
        if why := why_missing(name):
            pytest.skip(f"needs the extra integrations: {why}", allow_module_level=True)
