"""Loads the compiled kernels."""

import sys
import warnings
from pathlib import Path

import torch

LIBRARY = Path(__file__).parent / "_native.so"


def load() -> None:
    """Without the library everything still works on the reference, and says so once."""
    if not LIBRARY.exists():
        warnings.warn(
            f"mpkernels: the compiled kernels are missing from {LIBRARY.parent}, so the slow reference runs in their "
            f"place; in a checkout, `{sys.executable} -m pip install -v -e .` builds them and says what it left out",
            RuntimeWarning,
            stacklevel=3,
        )
        return
    torch.ops.load_library(str(LIBRARY))
