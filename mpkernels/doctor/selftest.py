"""Compares every kernel that can run here with its reference, on the samples of its op."""

from contextlib import nullcontext
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

import mpkernels
from mpkernels._torch_private.tensors import leaves_of, map_leaves
from mpkernels.doctor.samples import SAMPLES, Sample
from mpkernels.ops import _devices, _registry


class Result(NamedTuple):
    op: str
    device: str
    kernel: str
    problem: str  #: empty if all is well
    seconds: float


def run() -> list[Result]:
    """Compare all kernels, but not by Triton's interpreter on the CPU, because it doesn't round as chips do."""
    _devices.begin_to_use_cuda()
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return [
        _test(op, torch.device(device), kernel)
        for op in SAMPLES
        for device in devices
        for kernel in mpkernels.backends(op, device)
        if kernel != "reference" and (device, kernel) != ("cpu", "triton")
    ]


def _test(op: str, device: torch.device, kernel: str) -> Result:
    start = perf_counter()
    problems = ((number, _compare(op, device, kernel, sample)) for number, sample in enumerate(SAMPLES[op]))
    problem = next((f"sample {number}: {problem}" for number, problem in problems if problem), "")
    return Result(op, device.type, kernel, problem, perf_counter() - start)


def _compare(op: str, device: torch.device, kernel: str, sample: Sample) -> str:
    is_used = kernel == mpkernels.backends(op, device)[0]  # then the test goes through the dispatcher
    want_arguments, got_arguments = sample.arguments(torch.device("cpu")), sample.arguments(device)
    want = _registry._ops[op].reference(*want_arguments)
    try:
        with nullcontext() if is_used else mpkernels.backend(kernel):
            got = _registry._ops[op](*got_arguments)
        return _difference((want_arguments, want), (got_arguments, got), sample.tolerance)
    except Exception as error:  # any error in a kernel is its result
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _difference(want: Any, got: Any, tolerance: float) -> str:
    """Return how a kernel's results and changed arguments differ from the reference's; "" if they agree."""
    leaves = zip(leaves_of(want), leaves_of(map_leaves(_on_cpu, got)), strict=True)
    for a, b in leaves:
        if not isinstance(a, Tensor):
            continue
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"{tuple(b.shape)} of {b.dtype} in place of {tuple(a.shape)} of {a.dtype}"
        a, b = a.double(), b.double()
        finite = a.isfinite() & b.isfinite()
        if not torch.isclose(a[~finite], b[~finite], rtol=0.0, atol=0.0, equal_nan=True).all():
            return "an inf or NaN that the reference has not, or none where it has one"
        distance, norm = (a[finite] - b[finite]).norm().item(), a[finite].norm().item()
        if distance > tolerance * norm:
            return f"off by {distance:.3g} where the norm is {norm:.3g} and {tolerance:.3g} of it is allowed"
    return ""


def _on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value
