"""Finds which kernels can't run on which devices, and why: CUDA's machine code is made for some chips.

This is decided once, for all devices that torch sees, when torch begins to use CUDA and no device has a tensor yet.
"""

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpkernels.ops import _extension

Capability = tuple[int, int]
ANY_TRITON: Capability = (7, 0)  # what Triton's atomics and barriers need
capabilities: dict[torch.device, Capability] = {}  # of NVIDIA's devices, once torch uses CUDA
left_out: dict[torch.device, str] = {}  # where the compiled kernels can't run -> why, and what to do about it
_warned: set[torch.device] = set()

TOO_OLD = 35  # cudaErrorInsufficientDriver


def decide() -> None:
    """Note what the CUDA devices are, and where C++'s kernels can't run. torch must have begun to use CUDA."""
    build = _extension.build_info(_extension.LIBRARY).get("cuda", {})
    driver = _extension.ask_driver() if build.get("built_for") else None
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        capability = torch.cuda.get_device_capability(device)
        if torch.version.hip is None:
            capabilities[device] = capability
        if driver and (why := why_not_native(capability, build["built_for"], build["compiler"], driver)):
            left_out[device] = why


def begin_to_use_cuda() -> None:
    """Have torch begin to use CUDA, where there is a device."""
    if torch.cuda.is_available():
        torch.cuda.init()


def why_not_native(capability: Capability, built_for: Sequence[str], compiler: str, driver: tuple[int, int]) -> str:
    """Return why the compiled kernels can't run on a device, and what to do; nothing if they can.

    Args:
        capability: of the device.
        built_for: code, such as "sm_80", which runs on devices of the same major capability and no lower minor one,
            and PTX, such as "compute_80", which a driver no older than the compiler translates for any later one.
        compiler: "nvcc 13.0".
        driver: what ``ask_driver`` has returned.
    """
    error, version = driver
    ours, theirs = re.findall(r"[\d.]+", compiler)[0], f"{version // 1000}.{version % 1000 // 10}"
    update = "update the driver, or build mpkernels with an older CUDA toolkit"
    if error == TOO_OLD:
        return f"the driver is too old for CUDA {ours}, which they are built with: {update}"
    if error:
        return f"their CUDA {ours} fails with error {error}: install a driver, and a torch that is built for it"
    codes = [(kind, (int(number) // 10, int(number) % 10)) for kind, number in (it.split("_") for it in built_for)]
    if any(kind == "sm" and code[0] == capability[0] and code[1] <= capability[1] for kind, code in codes):
        return ""
    if any(kind == "compute" and code <= capability for kind, code in codes):
        if _pair(theirs) >= _pair(ours):
            return ""
        return f"they have no code for it, and the driver of CUDA {theirs} can't translate that of {ours}: {update}"
    least = min(code for _, code in codes)
    if capability < least:
        return f"they need compute capability {least[0]}.{least[1]}, and it has {capability[0]}.{capability[1]}"
    return f"they are built for {', '.join(built_for)}: build mpkernels anew, with an nvcc that knows this device"


def _pair(version: str) -> list[int]:
    return [*map(int, version.split("."))]


def warn_once(device: torch.device) -> None:
    """Warn that the compiled kernels can't run on a device that is used."""
    if device in _warned or device not in left_out:
        return
    _warned.add(device)
    name = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
    warnings.warn(
        f"mpkernels: the compiled kernels can't run on {device}{name}, so Triton's run there, or the slow reference "
        f"where there are none; {left_out[device]}",
        RuntimeWarning,
        stacklevel=3,
    )


def device_of(arguments: Sequence[Any]) -> torch.device | None:
    """Return the device of the first tensor, where kernels run; None if there is no tensor."""
    for argument in arguments:
        for value in argument if isinstance(argument, list) else (argument,):
            if torch.is_tensor(value):
                return value.device
    return None


def on_their_device(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """Make a launcher launch on its tensors' device, because Triton launches on the current one."""

    def launch(*arguments: Any) -> Any:
        device = device_of(arguments)
        if device is None or device.type != "cuda":
            return launcher(*arguments)
        with torch.cuda.device(device):
            return launcher(*arguments)

    return launch
