"""``python -m mpkernels``, or ``mpkernels`` alone."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from mpkernels import __version__

# command -> (the module with add_arguments(parser) and run(arguments, refuse), imported when called; what it does)
COMMANDS = {
    "demo": ("mpkernels.demo.command", "trains a small transformer by torch.amp and by mpkernels, beside each other"),
    "doctor": ("mpkernels.doctor.command", "what this machine has, which kernels it runs, and whether they are right"),
    "bench": ("mpkernels.bench.command", "measures everything beside torch's own"),
}


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        """Say what is wrong in one line."""
        self.exit(2, f"{self.prog}: {message}\n")


def main(words: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    parser = Parser("mpkernels", description="Mixed-precision training for PyTorch.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for name, (module, does) in COMMANDS.items():
        command = commands.add_parser(name, help=does, description=f"{name}: {does}")
        if name in words[:1]:
            importlib.import_module(module).add_arguments(command)
    arguments = parser.parse_args(words)
    if arguments.command is None:
        parser.print_help()
        return 0
    command = commands.choices[arguments.command]
    try:
        code: int = importlib.import_module(COMMANDS[arguments.command][0]).run(arguments, command.error)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"{command.prog}: interrupted", file=sys.stderr)
        return 130  # a shell's status after Ctrl-C
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # ``| head`` has closed the pipe
            where = f"{error.filename}: " if error.filename else ""
            print(f"{command.prog}: {where}{error.strerror or error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes into it at exit
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
