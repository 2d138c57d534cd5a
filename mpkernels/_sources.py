"""Tells whether a compiled library belongs to the C++ sources of a checkout. setup.py runs this file, without torch."""

import hashlib
from pathlib import Path


def fingerprint(checkout: Path) -> str | None:
    """Hash what the library is built from. Return None if the folder is no checkout, such as site-packages."""
    setup, csrc = checkout / "setup.py", checkout / "csrc"
    if not (setup.is_file() and csrc.is_dir()):
        return None
    digest = hashlib.sha256()
    sources = [path for path in csrc.rglob("*") if path.suffix in (".h", ".cpp", ".cu")]
    for path in (setup, checkout / "toolchain.py", *sorted(sources)):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(checkout).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()
