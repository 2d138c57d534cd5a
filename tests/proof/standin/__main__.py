"""Runs tests for CUDA without a GPU: python -m tests.proof.standin [options] [pytest's arguments]"""

import argparse
import fcntl
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests import ROOT
from tests.proof.standin.environment import Environment, UnavailableError


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="python -m tests.proof.standin", description=__doc__, allow_abbrev=False)
    parser.add_argument("--environment", type=Path, default=ROOT / "build/standin", help="where it is built: 6 GB")
    parser.add_argument("--require", action="store_true", help="fail where torch's CUDA build can't be had")
    parser.add_argument("--order", default="lazy", help="of the streams' work: lazy, eager or random:SEED")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--capability", default="9.0", help="of the devices in turn: 9.0,7.5")
    parser.add_argument("--driver", default="13.2", help="the newest CUDA that the driver serves")
    parser.add_argument("--no-peers", action="store_true", help="no device reaches another's memory")
    parser.add_argument("--triton", action="store_true", help="Triton's kernels, interpreted, instead of C++'s")
    return parser.parse_known_args(arguments)


def settings(options: argparse.Namespace) -> str:
    major, minor = map(int, options.driver.split("."))
    values = {
        "order": options.order,
        "devices": options.devices,
        "capability": options.capability.replace(".", ""),
        "driver": 1000 * major + 10 * minor,
        "peers": int(not options.no_peers),
        "protects": int(not options.triton),  # the interpreter reads device memory as the host's
    }
    return "".join(f"{name} {value}\n" for name, value in values.items())


def main(arguments: Sequence[str]) -> int:
    options, rest = parse(arguments)
    environment = Environment(options.environment)
    environment.directory.mkdir(parents=True, exist_ok=True)
    with (environment.directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the settings are those of one run
        try:
            environment.build()
        except UnavailableError as error:
            print(f"stand-in: nothing ran, for torch's CUDA build can't be had here: {error}")
            return int(options.require)
        (environment.library / "settings").write_text(settings(options))
        home = str(environment.directory / "home")
        variables = os.environ | {"HOME": home, "XDG_CACHE_HOME": home}
        target = "cuda-triton" if options.triton else "cuda-native"
        selection = ["-p", "tests.proof.standin.selection", f"--on={target}", f"--require={target}"]
        command = [str(environment.python), "-m", "pytest", *selection, *(rest or ["tests", "-n", "auto"])]
        return subprocess.run(command, cwd=environment.tree, env=variables).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
