"""Replaces a file whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file to write to. It gets the path's name when the context ends, once all has reached the disk. After
    an exception, what was there is still there.

    The file may be read by those who could read the one that it replaces. A new one may be read as any that ``open``
    makes."""
    unfinished = path.with_name(f".{path.name}.{token_hex(4)}")
    file = open(unfinished, "xb")  # noqa: SIM115, outside of try: what another has there isn't ours to remove
    try:
        with file:
            with suppress(OSError):  # there is none, or its file system knows no permissions
                shutil.copymode(path, unfinished)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(unfinished)
        raise
    if os.name == "posix":  # where the new name reaches the disk with its folder
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
