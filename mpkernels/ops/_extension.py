"""Finds and loads the compiled kernels."""

import ctypes
import functools
import json
import sys
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from struct import unpack_from
from typing import Any

import torch

from mpkernels._sources import fingerprint

_PACKAGE = Path(__file__).parent.parent


def _candidates() -> Iterator[Path]:
    """Yield the library in this package, then the libraries of installed packages that a checkout hides."""
    yield _PACKAGE / "_native.so"
    for installed in metadata.distributions(name="mpkernels"):
        yield Path(str(installed.locate_file("mpkernels/_native.so")))


def build_info(library: Path | None) -> dict[str, Any]:
    """Return what the build has noted beside ``library``; empty if nothing can be read."""
    try:
        info: dict[str, Any] = {} if library is None else json.loads((library.parent / "_build_info.json").read_text())
    except (OSError, ValueError):
        return {}
    return info


def _find() -> tuple[Path | None, str]:
    """Return the library to load, or None and the reason. A checkout refuses one that was built from other sources."""
    sources = fingerprint(_PACKAGE.parent)
    if sources is None:
        library = _PACKAGE / "_native.so"
        return (library, "") if library.exists() else (None, f"are missing from {_PACKAGE}")
    reason = f"are missing from {_PACKAGE}, and no installed mpkernels has them"
    for library in filter(Path.exists, _candidates()):
        if build_info(library).get("sources") == sources:
            return library, ""
        reason = f"in {library.parent} were built from other sources than those in {_PACKAGE.parent / 'csrc'}"
    return None, reason


LIBRARY, why_none = _find()


def load() -> None:
    """Load the compiled kernels. Without them, warn once: ops then run Triton's kernels on GPUs, else the reference."""
    global LIBRARY, why_none
    if LIBRARY is not None:
        try:
            _refuse_part(LIBRARY)
            torch.ops.load_library(str(LIBRARY))
            return
        except OSError as error:
            why_none = f"in {LIBRARY.parent} can't be loaded ({error.__cause__ or error})"
            LIBRARY = None
    warnings.warn(
        f"mpkernels: the compiled kernels {why_none}, so the slow reference runs in their place, "
        "on GPUs Triton's kernels; in a checkout, "
        f"`{sys.executable} -m pip install -v -e .` builds them and says what it left out",
        RuntimeWarning,
        stacklevel=3,
    )


def _refuse_part(library: Path) -> None:
    """Raise if the end of the file is missing, as after a copy that broke off: to load it would end the process."""
    with library.open("rb") as file:
        header = file.read(64).ljust(64, b"\0")
    (start,), (size, count) = unpack_from("<Q", header, 40), unpack_from("<HH", header, 58)  # ELF's last table
    if library.stat().st_size < max(64, start + size * count):
        raise OSError(f"{library}: file too short")


def ask_driver() -> tuple[int, int] | None:
    """Return the error of the library's CUDA runtime with this machine's driver (0 if none), and the CUDA version that
    the driver was made for, such as 13000. Return None if the library has no CUDA kernels."""
    ask = None if LIBRARY is None else getattr(_handle(), "mpkernels_ask_driver", None)
    version = ctypes.c_int()
    return None if ask is None else (ask(ctypes.byref(version)), version.value)


def multiplies_halves(dtype: torch.dtype) -> bool:
    """Return whether this CPU has instructions for products in a 16-bit dtype, as far as oneDNN may use them."""
    number = {torch.float16: 1, torch.bfloat16: 2}[dtype]  # as enum Dtype in csrc/common/numeric.h
    return LIBRARY is not None and bool(_handle().mpkernels_multiplies_halves(number))


@functools.cache
def _handle() -> ctypes.CDLL:
    return ctypes.CDLL(str(LIBRARY))
