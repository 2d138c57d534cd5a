"""What the selector chooses for each shape of the sweep, and how fast each of the Triton kernel's block shapes is.

``python -m benchmarks.tune OUT.json cuda``. ``linear_act_triton.CANDIDATES`` names them, and each is in force within
``with linear_act_triton.candidate(name)``.
"""

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import mpkernels
from mpkernels.bench import linear, machine, networks, pairs
from mpkernels.bench.settings import Place, Setting

KERNELS = "mpkernels.ops.linear.linear_act_triton"


def race(setting: Setting, names: list[str], kernels: Any) -> dict[str, float | None]:
    """Microseconds, forward and backward; a candidate that doesn't fit this chip is None."""
    stopwatch = pairs.STOPWATCHES["device"] if setting.place.device == "cuda" else pairs.wall_stopwatch
    times = {}
    for name in names:
        with mpkernels.backend("triton"), kernels.candidate(name):
            try:
                timed = stopwatch(linear.forward_and_backward(setting, networks.our_layer)())
                times[name] = round(1e6 * min(timed() for _ in range(7)), 1)
            except Exception as error:  # out of shared memory, say: the others still count
                times[name] = None
                print(f"{setting} {name}: {type(error).__name__}")
    return times


def main(path: Path, device: str) -> None:
    kernels = importlib.import_module(KERNELS) if importlib.util.find_spec(KERNELS) else None
    names = [*getattr(kernels, "CANDIDATES", ())] if device == "cuda" else []
    print(f"{len(names)} candidates in {KERNELS}")
    before: dict[str, Any] = json.loads(path.read_text())["candidates"] if path.exists() else {}
    found: dict[str, Any] = {"machine": machine.describe(), "choices": {}, "candidates": before}
    shapes = linear.SHAPES[device][: None if device == "cuda" else 1]
    for setting in (Setting(Place(device, 1), "bf16", linear.case(shape)) for shape in shapes):
        linear.forward_and_backward(setting, networks.our_layer)()()
        found["choices"] = mpkernels.selector.choices()
        if str(setting) not in before:
            before[str(setting)] = race(setting, names, kernels)
        path.write_text(json.dumps(found, indent=1))  # whoever stops this keeps what is known
        print(setting, min((time, name) for name, time in before[str(setting)].items() if time) if names else "")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
