"""Runs the tests for CUDA without a GPU: python -m tests.proof.standin [options] [pytest's arguments]

Without pytest's arguments it runs the rounds that stand below."""

import argparse
import fcntl
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests import ROOT
from tests.proof.standin.environment import Environment, UnavailableError

ROOMS = "tests/cuda tests/proof/standin"
FALLS_BACK = "-W ignore:mpkernels:RuntimeWarning -W ignore::UserWarning"  # as mpkernels and torch warn
ROUNDS = (  # options, and what runs with them
    ("", "tests"),
    ("--triton", "tests/ops tests/optim tests/amp tests/doctor --part=0/8"),
    ("--order=eager --no-peers", f"{ROOMS} --part=0/2"),
    ("--order=random:1", f"{ROOMS} --part=1/2"),
    ("--capability=7.5,8.6", "tests/cuda/test_devices.py --part=0/3"),
    ("--capability=8.9,12.0 --driver=13.0", "tests/cuda/test_devices.py --part=1/3"),
    ("--triton --capability=9.0,11.0 --driver=13.0", f"tests/cuda/test_devices.py --part=2/3 {FALLS_BACK}"),
)
REST = (  # by --all
    ("--triton", "tests --ignore=tests/cuda --ignore=tests/proof/standin"),
    ("--order=eager", "tests"),
    *((f"--order=random:{seed}", ROOMS) for seed in range(20)),
    *((f"--capability={capability}", ROOMS) for capability in ("7.5", "8.6", "8.9", "12.0")),
)


def parser() -> argparse.ArgumentParser:
    it = argparse.ArgumentParser(prog="python -m tests.proof.standin", description=__doc__, allow_abbrev=False)
    it.add_argument("--environment", type=Path, default=ROOT / "build/standin", help="where it is built: 6 GB")
    it.add_argument("--prepare", action="store_true", help="build the environment, and run nothing")
    it.add_argument("--require", action="store_true", help="fail where torch's CUDA build can't be had")
    it.add_argument(
        "--whole", action="store_true", help="run all tests of a round, also those that pytest's --all adds"
    )
    it.add_argument("--all", action="store_true", help="run the rounds that take an hour, too")
    it.add_argument("--order", default="lazy", help="when streams work: lazy, eager or random:SEED")
    it.add_argument("--devices", type=int, default=2)
    it.add_argument("--capability", default="9.0", help="of the devices in turn: 9.0,7.5")
    it.add_argument("--driver", default="13.2", help="the newest CUDA that the driver serves")
    it.add_argument("--no-peers", action="store_true", help="no device reaches another's memory")
    it.add_argument("--triton", action="store_true", help="Triton's kernels, interpreted, instead of C++'s")
    return it


def settings(options: argparse.Namespace) -> str:
    """Return the settings in the order in which runtime/machine.cpp reads them."""
    major, minor = map(int, options.driver.split("."))
    protects = not options.triton  # the interpreter reads device memory as the host's
    capabilities = options.capability.replace(".", "").split(",")
    numbers = options.devices, 1000 * major + 10 * minor, int(not options.no_peers), int(protects), *capabilities
    return f"{options.order} {' '.join(map(str, numbers))}\n"


def run(environment: Environment, options: argparse.Namespace, arguments: Sequence[str]) -> int:
    (environment.library / "settings").write_text(settings(options))
    home = str(environment.directory / "home")
    target = "cuda-triton" if options.triton else "cuda-native"
    selection = ["-p", "tests.proof.standin.selection", f"--on={target}", f"--require={target}"]
    command = [str(environment.python), "-m", "pytest", *selection, *arguments]
    variables = os.environ | {"HOME": home, "XDG_CACHE_HOME": home}
    return subprocess.run(command, cwd=environment.tree, env=variables).returncode


def main(arguments: Sequence[str]) -> int:
    options, rest = parser().parse_known_args(arguments)
    environment = Environment(options.environment)
    environment.directory.mkdir(parents=True, exist_ok=True)
    with (environment.directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the settings are those of one run
        try:
            environment.build()
        except UnavailableError as error:
            print(f"stand-in: nothing ran, for torch's CUDA build can't be had here: {error}")
            return int(options.require)
        if options.prepare:
            return 0
        if rest:
            return run(environment, options, rest)
        failed = []
        for round_options, tests in (*ROUNDS, *(REST if options.all else ())):
            print(f"stand-in: {round_options} {tests}", flush=True)
            chosen = parser().parse_args(round_options.split(), argparse.Namespace(**vars(options)))
            whole = ["--all"] if options.whole else []
            if run(environment, chosen, ["-q", "-n", "2", "--dist", "loadfile", *whole, *tests.split()]):
                failed.append(round_options)
        print("stand-in: " + (f"tests failed with {', '.join(failed)}" if failed else "all passed"))
        return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
