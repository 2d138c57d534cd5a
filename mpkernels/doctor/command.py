"""The command: gathers facts, tests kernels, prints a report."""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpkernels._shared.report_tables import Table
from mpkernels.doctor import kernels, machine, offload_speeds, selftest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="all of it, for a program")


def run(asked: argparse.Namespace, refuse: Callable[[str], Any]) -> int:
    tests, to_install = selftest.run(), kernels.to_install()
    found: dict[str, Any] = {
        "machine": machine.details(),
        "builds": kernels.builds(),
        "kernels": kernels.by_op(),
        "why not": kernels.why_not(),
        "offload": offload_speeds.rows(),
        "self-test": [result._asdict() for result in tests],
        "to install": to_install,
        "verdict": verdict(tests, to_install, machine.gpu()),
    }
    print(json.dumps(found, indent=1) if asked.json else _prose(found))
    return 1 if any(result.problem for result in tests) else 0


def verdict(tests: Sequence[selftest.Result], to_install: Sequence[str], gpu: str | None) -> str:
    """Return one sentence: whether this machine can train, and what to do next. ``to_install`` names what brings better
    kernels; ``gpu`` is the GPU that torch sees."""
    wrong = [it for it in tests if it.problem]
    if wrong:
        first = f"{wrong[0].op} on {wrong[0].device}, {wrong[0].kernel}"
        return (
            f"Don't train with this build: {len(wrong)} of {len(tests)} kernels are wrong, first {first}. "
            'Next: train under `with mpkernels.backend("reference")`, and report `python -m mpkernels doctor --json`.'
        )
    on_gpu = [it for it in tests if it.device == "cuda"]
    if gpu is not None and not on_gpu:
        state = f"Training on {gpu} works, but every op runs on the slow reference there"
    elif not tests:
        state = "Training works, but every op runs on the slow reference"
    else:
        place = gpu or "the CPU (torch sees no GPU)"
        state = f"Ready to train on {place}: all {len(tests)} kernels agree with the reference"
    next_step = f"install {to_install[0]}" if to_install else "`python -m mpkernels bench --quick` measures the gain"
    return f"{state}. Next: {next_step}."


def _prose(found: Mapping[str, Any]) -> str:
    used = {
        op: "; ".join(f"{device}: {', '.join(names)}" for device, names in devices.items())
        for op, devices in found["kernels"].items()
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
        "offload: the least that copies, or the host's cores, let a step take": _table(found["offload"])
        or ["there is no GPU"],
        "self-test": _outcome(found["self-test"]),
        "to get more, install": found["to install"] or ["nothing"],
    }
    blocks = [
        "\n".join([title, *(f"  {line}" for entry in entries for line in entry.splitlines())])
        for title, entries in parts.items()
    ]
    return "\n\n".join([*blocks, found["verdict"]])


def _table(rows: Mapping[str, str]) -> list[str]:
    return Table(("", ""), list(rows.items())).lines()[1:]


def _outcome(tests: list[dict[str, Any]]) -> list[str]:
    if not tests:
        return ["there is no kernel to test: all runs on the reference"]
    failed = [it for it in tests if it["problem"]]
    seconds = sum(it["seconds"] for it in tests)
    return [
        f"{len(tests) - len(failed)} of {len(tests)} kernels agree with the reference ({seconds:.1f} s)",
        *(f"FAILED: {it['op']} on {it['device']}, {it['kernel']}: {it['problem']}" for it in failed),
    ]
