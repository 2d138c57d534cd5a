"""Loads the compiled kernels."""

import ctypes
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


def cublaslt_notes() -> tuple[dict[str, int], dict[str, int]] | None:
    """How many products of each op cublasLt ended, and why it ended others not, how often. None: no kernels in CUDA
    C++."""
    notes = getattr(ctypes.CDLL(str(LIBRARY)), "mpkernels_cublaslt_notes", None) if LIBRARY.exists() else None
    if notes is None:
        return None
    notes.restype = ctypes.c_char_p
    lines = notes().decode().splitlines()
    end = lines.index("")
    products, refusals = (
        {what: int(count) for count, _, what in (line.partition(" ") for line in part)}
        for part in (lines[:end], lines[end + 1 :])
    )
    return products, refusals
