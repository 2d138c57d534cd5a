"""What ``mpkernels.tune`` has found, on disk: a file for all machines and versions that share a home.

The file only saves time: one that can't be read, written or understood is as good as none.
"""

import json
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from mpkernels._shared import cpu
from mpkernels._shared.files import replacing
from mpkernels.selector.case import Case
from mpkernels.selector.timing import Timed


def path() -> Path:
    return Path.home() / ".cache" / "mpkernels" / "tuned.json"


def load(case: Case) -> Timed | None:
    """Return what ``save`` wrote; None if the file holds nothing of that form."""
    kept = _read().get(_key(case))
    times, left_out = (kept.get("us"), kept.get("left_out")) if isinstance(kept, dict) else (None, None)
    if not (isinstance(times, dict) and "torch" in times and isinstance(left_out, dict)):
        return None
    if not all(isinstance(it, int | float) and it > 0 for it in times.values()):
        return None
    return Timed({name: each / 1e6 for name, each in times.items()}, left_out)


def save(case: Case, it: Timed) -> None:
    times = {name: round(1e6 * each, 1) for name, each in it.seconds.items()}
    everything = _read() | {_key(case): {"us": times, "left_out": it.left_out}}
    with suppress(OSError, RuntimeError):  # read-only, full, or no home
        path().parent.mkdir(parents=True, exist_ok=True)
        with replacing(path()) as file:
            file.write(json.dumps(everything, indent=1).encode())


def clear() -> None:
    with suppress(OSError, RuntimeError):
        path().unlink(missing_ok=True)


def _read() -> dict[str, Any]:
    try:
        everything = json.loads(path().read_text())
    except (OSError, RuntimeError, ValueError):
        return {}
    return everything if isinstance(everything, dict) else {}


def _version(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"no {package}"


def _key(case: Case) -> str:
    """Return the key of a case, with all that makes another choice likely."""
    if case.device.type == "cuda":
        name = torch.cuda.get_device_name(case.device)
    else:
        name = f"{cpu.name()} {cpu.simd()}, {torch.get_num_threads()} threads"
    versions = map(_version, ("torch", "triton", "mpkernels"))
    return ", ".join((f"{case} of {' '.join(case.kernels)}", name, *versions))
