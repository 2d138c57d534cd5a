"""Tells which CPU this is, and the features on which the fastest kernel depends."""

import functools
import platform
from pathlib import Path

import torch

_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "asimd", "bf16", "sve")


@functools.cache
def _facts() -> dict[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def name() -> str:
    """Return the CPU's name, with family and model, because virtual machines shorten the name, to "AMD EPYC" say."""
    facts = _facts()
    short = facts.get("model name") or platform.processor() or platform.machine()
    return f"{short}, family {facts['cpu family']} model {facts['model']}" if "cpu family" in facts else short


def features() -> list[str]:
    """Return the instruction sets that kernels care about; empty if the system doesn't tell."""
    flags = " ".join(_facts().get(key, "") for key in ("flags", "Features")).split()
    return [feature for feature in _FEATURES if feature in flags]


def simd() -> str:
    """Return the widest instruction set that torch uses on this CPU, "AVX512 AMX" say."""
    has_amx = any(feature.startswith("amx") for feature in features())
    return torch.backends.cpu.get_cpu_capability() + (" AMX" if has_amx else "")
