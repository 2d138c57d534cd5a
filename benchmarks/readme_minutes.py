"""Times README's two commands, as they stand there, in an empty environment and a copy of this checkout.

``python -m benchmarks.readme_minutes benchmarks/results/readme/FILE.json``: README says, in minutes, what FILE holds.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

from mpkernels.doctor import machine

ROOT = Path(__file__).parents[1]
PARTS = {"build": "pip install -v", "demo": "mpkernels demo", "tests": "pytest"}  # and a word of each one's command


def commands(readme: str) -> list[str]:
    lines = [line for line in readme.splitlines() if line.startswith("python3 -m venv")]
    return [command for line in lines for command in line.split(" && ")]


def time_all(checkout: Path) -> dict[str, float]:
    """Return how many seconds each part took the first time."""
    seconds: dict[str, float] = {}
    for command in commands((checkout / "README.md").read_text()):
        print(f"$ {command}", flush=True)
        start = perf_counter()
        subprocess.run(command, shell=True, check=True, cwd=checkout)
        for part, word in PARTS.items():
            if word in command:
                seconds.setdefault(part, round(perf_counter() - start, 1))
    return seconds


def minutes(recorded: Path) -> dict[str, int]:
    """Return the whole minutes of each part, at least one."""
    return {part: max(1, round(it / 60)) for part, it in json.loads(recorded.read_text())["seconds"].items()}


def main(recorded: Path) -> None:
    os.environ.pop("VIRTUAL_ENV", None)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    with tempfile.TemporaryDirectory() as scratch:
        for name in listed.rstrip("\0").split("\0"):
            Path(scratch, name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, Path(scratch, name))
        seconds = time_all(Path(scratch))
    facts = machine.describe() | {"nvcc": bool(shutil.which("nvcc")), "seconds": seconds}
    recorded.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
