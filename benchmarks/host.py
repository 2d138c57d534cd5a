"""Times what the host spends on a call, ours beside torch's: on tensors so small that nothing else takes time.

``python -m benchmarks.host NAME`` writes results/host/NAME.json for the book. Both sides run in short slices, in turns,
on one thread. A side's time is the mean of its fastest 3 % of slices: other programs only slow slices down.
"""

import gc
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn import GELU, Linear, Module, functional

from mpkernels import amp, optim, selector
from mpkernels import functional as ours
from mpkernels.doctor.machine import describe
from mpkernels.nn import fuse

FOLDER = Path(__file__).parent / "results" / "host"
SECONDS, SLICE, FASTEST = 5.0, 1e-3, 0.03
B16, F32 = torch.bfloat16, torch.float32
DTYPES = {"fp32": (F32, False), "bf16": (B16, False), "bf16 autocast": (F32, True)}
COUNTS = 1, 20, 1000

Run = Callable[[], object]


def slices_in_turns(runs: dict[str, Run], seconds: float) -> dict[str, list[float]]:
    """Return each side's microseconds a call in the fastest slices, the least first."""
    calls = {}
    for side, run in runs.items():
        for _ in range(30):
            run()
        start = perf_counter()
        run()
        calls[side] = max(1, int(SLICE / (perf_counter() - start)))
    times: dict[str, list[float]] = {side: [] for side in runs}
    gc.collect()
    gc.disable()
    end = perf_counter() + seconds
    while perf_counter() < end:
        for side, run in runs.items():
            start = perf_counter()
            for _ in range(calls[side]):
                run()
            times[side].append((perf_counter() - start) / calls[side] * 1e6)
    gc.enable()
    return {side: sorted(it)[: max(1, int(len(it) * FASTEST))] for side, it in times.items()}


def layers(dtype: torch.dtype, is_mixed: bool) -> Iterator[tuple[str, dict[str, Run]]]:
    """Yield forward and backward of each function on 4x8 tensors, beside torch's functions."""
    x, gate, up, out = (torch.randn(shape, dtype=dtype).requires_grad_() for shape in ((4, 8), (8, 8), (8, 8), (8, 8)))
    bias, out_bias = (torch.randn(8, dtype=dtype).requires_grad_() for _ in range(2))
    leaves = x, gate, up, out, bias, out_bias
    dy = torch.randn(4, 8, dtype=B16 if is_mixed else dtype)
    linear, gelu, silu = functional.linear, functional.gelu, functional.silu

    def step(call: Callable[[], Tensor]) -> None:
        for leaf in leaves:
            leaf.grad = None
        if is_mixed:
            with torch.autocast("cpu", B16):
                y = call()
        else:
            y = call()
        y.backward(dy)

    calls: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {
        "linear_act": (lambda: ours.linear_act(x, gate, bias), lambda: gelu(linear(x, gate, bias))),
        "mlp": (
            lambda: ours.mlp(x, gate, bias, out, out_bias),
            lambda: linear(gelu(linear(x, gate, bias)), out, out_bias),
        ),
        "gated_linear": (lambda: ours.gated_linear(x, gate, up), lambda: silu(linear(x, gate)) * linear(x, up)),
        "gated_mlp": (
            lambda: ours.gated_mlp(x, gate, up, out),
            lambda: linear(silu(linear(x, gate)) * linear(x, up), out),
        ),
    }
    for name, (mine, theirs) in calls.items():
        yield name, {"ours": partial(step, mine), "torch": partial(step, theirs)}


class Mlp(Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = Linear(8, 8), GELU(), Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return self.fc2(self.act(self.fc1(x)))


def fused() -> dict[str, Run]:
    plain, model, x = Mlp(), Mlp(), torch.randn(4, 8)
    fuse(model)
    return {"ours": lambda: model(x), "torch": lambda: plain(x)}


def steps(dtype: torch.dtype, count: int, scaler: str) -> dict[str, Run]:
    """Return a step of AdamW over so many 4x8 tensors, ours with its default guard. torch's takes fp32 alone."""

    def one(kind: Any, dtype: torch.dtype, scaling: Any, **options: Any) -> Run:
        params = [torch.randn(4, 8, dtype=dtype).requires_grad_() for _ in range(count)]
        optimizer = kind(params, lr=1e-6, **options)
        for param in params:
            param.grad = torch.full_like(param, 1e-3)
        if scaling is None:
            return lambda: optimizer.step()

        def step() -> None:
            scaling._per_optimizer_states.clear()  # as update() does, which costs the same on both sides
            scaling.step(optimizer)

        scaling.scale(torch.ones(()))
        return step

    torchs = partial(torch.amp.GradScaler, "cpu", init_scale=1.0)
    scalers = {"none": lambda: None, "torch's": torchs, "our": partial(amp.GradScaler, "cpu", init_scale=1.0)}
    return {
        "ours": one(optim.AdamW, dtype, scalers[scaler]()),
        "torch": one(torch.optim.AdamW, F32, None if scaler == "none" else torchs(), fused=True),
    }


def cases() -> Iterator[tuple[str, str | None, dict[str, Run]]]:
    """Yield each case's name, the kernel to pin, and its two sides."""
    for dtype, (kind, is_mixed) in DTYPES.items():
        for name, runs in layers(kind, is_mixed):
            for pinned in (None, "native"):
                yield f"{name}, {dtype}: {'by our kernels' if pinned else 'as the table chooses'}", pinned, runs
    yield "a fused MLP, forward, fp32: as the table chooses", None, fused()
    for dtype, count, scaler in product(("fp32", "bf16"), COUNTS, ("none", "torch's", "our")):
        under = "" if scaler == "none" else f", under {scaler} scaler"
        yield f"AdamW.step, {count} x 4x8, {dtype}{under}", None, steps(DTYPES[dtype][0], count, scaler)


def measure(seconds: float = SECONDS) -> dict[str, Any]:
    torch.set_num_threads(1)
    rows = {}
    for name, pinned, runs in cases():
        selector.pin(pinned)
        rows[name] = {side: [round(it, 3) for it in found] for side, found in slices_in_turns(runs, seconds).items()}
        print(f"{name}: {ratio(rows[name])}", flush=True)
    selector.pin(None)
    return {"machine": describe(), "us": rows}


def ratio(row: dict[str, list[float]]) -> str:
    """Return ours over torch's time."""
    return f"{mean(row['ours']) / mean(row['torch']):.2f}"


def table(path: Path) -> tuple[list[str], list[list[str]]]:
    """Return the table of a file: microseconds of both sides, and their ratio."""
    found = json.loads(path.read_text())
    machine = "{cpu}, torch {torch}".format(**found["machine"])
    header = [f"{machine} ([samples](../benchmarks/results/host/{path.name}))", "ours", "torch", "ours / torch"]
    cells = [
        [name, *(f"{mean(row[side]):.1f} us" for side in ("ours", "torch")), ratio(row)]
        for name, row in found["us"].items()
    ]
    return header, cells


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{sys.argv[1]}.json").write_text(json.dumps(measure(), indent=1) + "\n")
