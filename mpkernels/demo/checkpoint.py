"""A file that is there whole or not at all, and that only a demo could have written."""

import io
import os
from pathlib import Path
from typing import Any

import torch

from mpkernels.checkpoint import replacing

FORMAT = "mpkernels demo 1"


class UnusableError(Exception):
    """In words for the user."""


def save(path: Path, state: dict[str, Any], is_first: bool = False) -> None:
    """The first one of a run sets aside what an earlier run has left."""
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **state}, buffer)  # not to the file: torch has no errno for a disk that is full
    try:
        with replacing(path) as file:
            file.write(buffer.getbuffer())
            file.flush()
            if is_first and path.exists():
                os.replace(path, path.with_suffix(".previous.pt"))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def load(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise UnusableError(f"--resume: there is no checkpoint at {path}")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # whatever torch and pickle make of a file that isn't theirs
        raise UnusableError(f"--resume: {path} can't be read as a checkpoint") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise UnusableError(f"--resume: {path} is not a checkpoint of this demo")
    return state
