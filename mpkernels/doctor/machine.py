"""Describes this machine, without the host's name, for doctor and for the files of measured samples."""

import functools
import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import torch

import mpkernels
from mpkernels._shared import cpu
from mpkernels.ops import _extension

Description = dict[str, str | int | None]


@functools.cache
def describe() -> Description:
    gpu = torch.cuda.is_available()
    return {
        "cpu": cpu.name(),
        "simd": cpu.simd(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if gpu else None,
        "driver": _driver() if gpu else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "mpkernels": mpkernels.__version__,
        "commit": _commit(),
    }


def details() -> dict[str, str]:
    """Return the machine's description as doctor shows it."""
    return {name: str(value) for name, value in describe().items() if value is not None} | {
        "threads": str(torch.get_num_threads()),
        "gpu": gpu() or "none that torch sees",
        "cuda of torch": torch.version.cuda or "none",
        "library": str(_extension.LIBRARY or "none"),
        "nvcc": "on PATH" if shutil.which("nvcc") else "not on PATH",
    }


def gpu() -> str | None:
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    name = f"{properties.name}, sm_{properties.major}{properties.minor}, {properties.total_memory / 2**30:.0f} GiB"
    return f"{torch.cuda.device_count()} of {name}" if torch.cuda.device_count() > 1 else name


def _driver() -> str | None:
    return _first_word("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def _commit() -> str | None:
    """Return the commit of the checkout; None where the package is installed, or there is no git."""
    root = Path(mpkernels.__file__).parents[1]
    return (
        _first_word("git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*")
        if (root / ".git").exists()
        else None
    )


def _first_word(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    words = subprocess.run(command, capture_output=True, text=True).stdout.split()
    return words[0] if words else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
