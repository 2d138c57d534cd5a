"""Times the ways to compute linear layers and MLPs, in turns. A chip's lines in mpkernels/selector/table.py quote it.

``python -m benchmarks.selector_table cuda`` prints each way's speed as a multiple of torch's, and ``--json FILE`` keeps
the times. ``python -m benchmarks.selector_table cpu --threads 1`` takes a grid of small and middling sizes. A line of
the table quotes such a file; run this twice on a quiet machine before you write one.
"""

import argparse
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

import mpkernels
from mpkernels.doctor.machine import describe
from mpkernels.nn import MLP, LinearAct
from mpkernels.selector.tune import TuneReport

B16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SMOOTH, GATES = ("gelu", "gelu_tanh", "silu", "relu"), ("silu", "gelu_tanh", "gelu")


class Call(NamedTuple):
    op: str
    activation: str
    features: int
    hidden: int
    rows: int
    dtype: torch.dtype = B16  # autocast's; fp32 runs without autocast

    def __str__(self) -> str:
        sizes = f"{self.rows}x{self.features}x{self.hidden}"
        return f"{self.op} {self.activation} {sizes} {str(self.dtype).removeprefix('torch.')}"

    def module(self) -> torch.nn.Module:
        if self.op == "linear_act":
            return LinearAct(self.features, self.hidden, activation=self.activation)
        is_gated = self.op == "gated_mlp"
        return MLP(self.features, self.hidden, bias=not is_gated, activation=self.activation, gated=is_gated)

    def measure(self, device: str) -> TuneReport:
        with torch.device(device):
            model, x = self.module(), torch.randn(self.rows, self.features)
        with torch.autocast(device, None if self.dtype == F32 else self.dtype, enabled=self.dtype != F32):
            return mpkernels.tune(model, x)


def on_gpus() -> Iterator[Call]:
    """Yield sizes of GPT-2 and Llama, among others; 28672 is Llama 70B's."""
    for rows, (features, hidden) in product(
        (8192, 64, 512, 2048), ((768, 3072), (4096, 14336), (1024, 4096), (2048, 8192))
    ):
        yield Call("linear_act", "gelu", features, hidden, rows)
        yield Call("mlp", "gelu_tanh", features, hidden, rows)
        yield Call("gated_mlp", "silu", features, hidden, rows)
    for rows in (8192, 64):
        yield Call("gated_mlp", "silu", 8192, 28672, rows)
        yield Call("linear_act", "gelu", 1024, 4096, rows, F32)
        yield Call("linear_act", "gelu", 1024, 4096, rows, F16)


def on_cpus() -> Iterator[Call]:
    sizes, rows = ((256, 1024), (768, 3072)), (4, 16, 64, 256, 512)
    for op, activations in (("linear_act", (*SMOOTH, "tanh", "sigmoid")), ("mlp", SMOOTH), ("gated_mlp", GATES)):
        for activation, (features, hidden), count in product(activations, sizes, rows):
            yield Call(op, activation, features, hidden, count, F32)
    for dtype, op in product((B16, F16), ("linear_act", "mlp", "gated_mlp")):
        yield Call(op, "silu", *sizes[0], 64, dtype)


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.selector_table", description=__doc__)
    parser.add_argument("device", choices=["cpu", "cuda"])
    parser.add_argument("--only", default="", help="a part of the cases' names")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="keep what was measured, added to what is there")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found: dict[str, Any] = {}
    try:
        measure(options, found)
    finally:  # also after Ctrl-C: keep what was measured so far
        if options.json is not None and found:
            keep(options, found)


def measure(options: argparse.Namespace, found: dict[str, Any]) -> None:
    for case in on_cpus() if options.device == "cpu" else on_gpus():
        if options.only in str(case):
            report = case.measure(options.device)
            ((_, timed),) = report.timed.items()
            found[str(case)] = {way: round(1e6 * seconds, 1) for way, seconds in timed.seconds.items()}
            torchs = timed.seconds["torch"]
            ratios = ", ".join(f"{way} {torchs / seconds:.2f}" for way, seconds in timed.seconds.items())
            print(
                f"{case}: {ratios}",
                *(f"; {name} is left out: {why}" for name, why in timed.left_out.items()),
                flush=True,
            )


def keep(options: argparse.Namespace, found: dict[str, Any]) -> None:
    runs = json.loads(options.json.read_text())["runs"] if options.json.exists() else []
    runs.append({"threads": options.threads, "us": found})
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"machine": describe(), "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
