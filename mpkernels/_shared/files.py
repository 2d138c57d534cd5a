"""Replaces a file whole or not at all."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file to write to. When the context ends and all data has reached the disk, the file replaces the one
    at ``path``, and takes over its permissions. After an exception, the old file is still there.

    Without an old file, the permissions are those that ``open`` gives."""
    if not path.parent.is_dir():  # an error of the unfinished file would have a name that nobody gave
        raise FileNotFoundError(errno.ENOENT, "no such folder", str(path.parent))
    unfinished = path.with_name(f".{path.name}.{token_hex(4)}")
    file = open(unfinished, "xb")  # noqa: SIM115, outside of try: another's file of this name isn't ours to remove
    try:
        with file:
            with suppress(OSError):  # no old file, or a file system without permissions
                shutil.copymode(path, unfinished)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(unfinished)
        raise
    if os.name == "posix":  # the new name reaches the disk when its folder does
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
