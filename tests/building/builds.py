"""Runs a user's build commands, in copies of the checkout."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests import ROOT


def attempt(*command: str, cwd: Path, **env: str) -> tuple[int, str]:
    """Run a command. Return its exit status and its output."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}  # set by conftest.py
    done = subprocess.run(
        command, cwd=cwd, env=inherited | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return done.returncode, done.stdout


def python(*arguments: str, cwd: Path, **env: str) -> str:
    status, output = attempt(sys.executable, *arguments, cwd=cwd, **env)
    assert status == 0, output
    return output


def copy_checkout(to: Path) -> Path:
    """Copy the files that git would track. git isn't asked, because .ci/run tests a copy that is no repository."""
    ignored = [Path(line).name for line in (ROOT / ".gitignore").read_text().split()]
    return shutil.copytree(ROOT, to, ignore=shutil.ignore_patterns(".git", *ignored))
