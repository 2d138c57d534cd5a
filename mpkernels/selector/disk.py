"""The selector's memory on disk: a file for all machines and versions that share a home.

It only saves time: a file that can't be read, written or understood is as good as none.
"""

import functools
import json
import os
import tempfile
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from mpkernels.selector import machine
from mpkernels.selector.case import Choice


def path() -> Path:
    return Path.home() / ".cache" / "mpkernels" / "choices.json"


def load(case: str, device: torch.device) -> Choice | None:
    return as_choice(_read().get(_key(case, device)))


def as_choice(kept: Any) -> Choice | None:
    """Return what ``save`` wrote, if it is that."""
    name, left_out = (kept.get("choice"), kept.get("left_out", {})) if isinstance(kept, dict) else (None, None)
    return Choice(name, left_out) if isinstance(name, str) and isinstance(left_out, dict) else None


def save(case: str, device: torch.device, choice: Choice, seconds: dict[str, float]) -> None:
    _read.cache_clear()  # others may have saved meanwhile
    times = {name: round(1e6 * each, 1) for name, each in seconds.items()}
    kept = {"choice": choice.name, "us": times} | ({"left_out": choice.left_out} if choice.left_out else {})
    everything = _read() | {_key(case, device): kept}
    with suppress(OSError, RuntimeError):  # read-only, full, or no home
        _replace(path(), json.dumps(everything, indent=1))
    _read.cache_clear()


def clear() -> None:
    with suppress(OSError, RuntimeError):
        path().unlink(missing_ok=True)
    _read.cache_clear()


@functools.cache
def _read() -> dict[str, Any]:
    try:
        everything = json.loads(path().read_text())
    except (OSError, RuntimeError, ValueError):
        return {}
    return everything if isinstance(everything, dict) else {}


def _replace(target: Path, text: str) -> None:
    """At once, so that another process reads the old file or the new one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=target.name)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


@functools.cache
def _version(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"no {package}"


def _key(case: str, device: torch.device) -> str:
    """Return the key of a case, with all that makes another choice likely."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{machine.name()} {machine.simd()}, {torch.get_num_threads()} threads"
    return ", ".join((case, name, *map(_version, ("torch", "triton", "mpkernels"))))
