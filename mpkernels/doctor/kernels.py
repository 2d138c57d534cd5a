"""Tells which kernels are there, which are missing, and what would have to be installed."""

import importlib.util
import shutil
from typing import Any

import torch

import mpkernels
from mpkernels.ops import _devices, _dispatcher, _extension, _registry

DEVICES = tuple(_dispatcher.DEVICES)


def builds() -> dict[str, Any]:
    """Return what was compiled for each device, or why it was left out."""
    info = _extension.build_info(_extension.LIBRARY)
    return {device: info[device] for device in DEVICES if device in info}


def by_op() -> dict[str, dict[str, list[str]]]:
    """Return each op's kernels on each device. The first kernel is the one that runs."""
    _devices.begin_to_use_cuda()
    return {op: {device: mpkernels.backends(op, device) for device in DEVICES} for op in sorted(_registry._ops)}


def why_not() -> dict[str, str]:
    """Return for each kind of kernel that isn't used on a device the reason why."""
    built, reasons = builds(), {}
    for device in DEVICES:
        left_out = built.get(device, {}).get("left_out", "")
        if not built:
            reasons[f"native on {device}"] = f"the compiled kernels {_extension.why_none}"
        elif left_out:
            reasons[f"native on {device}"] = f"left out of the build: {left_out}"
    _devices.begin_to_use_cuda()
    reasons |= {f"native on {device}": why for device, why in _devices.left_out.items()}
    if _lacks_triton():
        reasons["triton"] = "it is not installed" + ", and compiles for GPUs" * (not torch.cuda.is_available())
    elif not _registry._triton_runs_on("cpu"):
        reasons["triton on cpu"] = "it compiles for GPUs"
    if not torch.cuda.is_available():
        built_for = "torch is built without CUDA" if torch.version.cuda is None else "torch sees no GPU"
        reasons["anything on cuda"] = built_for
    return reasons


def to_install() -> list[str]:
    """Return what to install to get missing kernels that this machine could run."""
    advice = []
    if _extension.LIBRARY is None:
        advice.append("a C++ compiler, then mpkernels again: without compiled kernels the slow reference runs")
    if torch.cuda.is_available():
        advice += [f"mpkernels again, for {device}: {why}" for device, why in _devices.left_out.items()]
        if builds().get("cuda", {}).get("left_out"):
            advice.append("nvcc from CUDA 12.1 or newer, then mpkernels again: for the kernels in CUDA C++")
        if _lacks_triton():
            advice.append("triton: for its kernels")
    elif torch.version.cuda is None and shutil.which("nvidia-smi") is not None:
        advice.append("a torch that is built for CUDA: there is a driver, and torch can't use it")
    return advice


def _lacks_triton() -> bool:
    return importlib.util.find_spec("triton") is None
