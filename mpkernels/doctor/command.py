"""The command: gathers, tests, prints."""

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from mpkernels.doctor import machine, selftest, shapes, verdict
from mpkernels.selector import rule
from mpkernels.tables import Table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "layers",
        nargs="*",
        metavar="MODEL",
        help="module:attribute, or sizes like 768x50257: do they fit tensor cores?",
    )
    parser.add_argument("--json", action="store_true", help="all of it, for a program")


def run(asked: argparse.Namespace, refuse: Callable[[str], Any]) -> int:
    try:
        advice = {each: _advise(each) for each in asked.layers}
    except ValueError as error:
        refuse(str(error))
    tests, better = selftest.run(), machine.better_kernels()
    found: dict[str, Any] = {
        "machine": machine.describe(),
        "builds": machine.builds(),
        "kernels": machine.kernels(),
        "why not": machine.why_not(),
        "self-test": [result._asdict() for result in tests],
        "rule": rule.table(),
        "to install": [*better, *machine.more_output()],
        "shapes": {name: [each._asdict() for each in of_one] for name, of_one in advice.items()},
        "verdict": verdict.of(tests, better, machine.gpu()),
    }
    print(json.dumps(found, indent=1) if asked.json else _prose(found))
    return 1 if any(result["problem"] for result in found["self-test"]) else 0


def _advise(text: str) -> list[shapes.Advice]:
    of_sizes = shapes.of_sizes(text)
    return shapes.advise(_model(text)) if of_sizes is None else of_sizes


def _model(text: str) -> nn.Module:
    module, colon, attribute = text.partition(":")
    if not (module and colon and attribute):
        raise ValueError(f"MODEL must be module:attribute or sizes like 768x50257, got {text!r}")
    sys.path.insert(0, "")  # what lies here, as for python -m
    try:
        value = importlib.import_module(module)
        for name in attribute.split("."):
            value = getattr(value, name)
        made: Any = value if isinstance(value, nn.Module) or not callable(value) else value()
    except Exception as error:  # whatever that module does
        raise ValueError(f"{text} can't be had: {type(error).__name__}: {str(error).partition(chr(10))[0]}") from None
    if not isinstance(made, nn.Module):
        raise ValueError(f"{text} must be a torch.nn.Module or make one, got {type(made).__name__}")
    return made


def _prose(found: Mapping[str, Any]) -> str:
    tests = found["self-test"]
    failed = [it for it in tests if it["problem"]]
    seconds = sum(it["seconds"] for it in tests)
    outcome = [f"{len(tests) - len(failed)} of {len(tests)} kernels agree with the reference ({seconds:.1f} s)"]
    outcome = outcome if tests else ["there is no kernel to test: all runs on the reference"]
    outcome += [f"FAILED: {it['op']} on {it['device']}, {it['kernel']}: {it['problem']}" for it in failed]
    used = {
        op: "; ".join(f"{device}: {', '.join(names)}" for device, names in of_op.items())
        for op, of_op in found["kernels"].items()
    }
    built = {
        device: f"left out: {it['left_out']}" if it["left_out"] else f"{', '.join(it['built_for'])}, {it['compiler']}"
        for device, it in found["builds"].items()
    }
    parts = {
        "machine": _table(found["machine"]),
        "compiled kernels": _table(built) or ["none"],
        "kernels of each op: the first is used, where there is such a device": _table(used),
        "why not others": _table(found["why not"]),
        "self-test": outcome,
        "what computes linear layers and MLPs: the first line that fits, else plain torch": Table(
            rule.HEAD, found["rule"]
        ).lines(),
        "to get more, install": found["to install"] or [machine.nothing_to_install()],
    }
    for name, advice in found["shapes"].items():
        of_one = [f"{it['where']}: {it['problem']}; {it['remedy']}" for it in advice]
        parts[f"tensor cores and {name}"] = of_one or ["every size is a multiple of 16 bytes"]
    blocks = [
        "\n".join([title, *(f"  {line}" for entry in entries for line in entry.splitlines())])
        for title, entries in parts.items()
    ]
    return "\n\n".join([*blocks, found["verdict"]])


def _table(rows: Mapping[str, str]) -> list[str]:
    """Return a line for each row. Further lines of a value stand below its first one."""
    width = max(map(len, rows), default=0)
    return [f"{name:{width}}  {value.replace(chr(10), chr(10) + ' ' * (width + 2))}" for name, value in rows.items()]
