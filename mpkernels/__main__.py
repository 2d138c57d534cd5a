"""The ``mpkernels`` command."""

import importlib
import sys

COMMANDS = {
    "demo": ("mpkernels.demo", "trains a small transformer by torch.amp and by mpkernels, beside each other"),
    "doctor": ("mpkernels.doctor", "what this machine has, which kernels it runs, and whether they are right"),
}


def main() -> int:
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in COMMANDS:
        return int(importlib.import_module(COMMANDS[name][0]).main(sys.argv[2:]))
    if name in ("-h", "--help"):
        print("usage: mpkernels COMMAND ...\n")
        print("\n".join(f"  {name:10}{what}" for name, (_, what) in COMMANDS.items()))
        return 0
    print(f"mpkernels: command must be one of {', '.join(COMMANDS)}, got {name!r}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
