"""Tells which CPU this is, and the instructions on which the fastest kernel depends."""

import functools
import platform
from pathlib import Path

import torch


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


def simd() -> str:
    """Return the widest instruction set that torch uses on this CPU, "AVX512 AMX" say."""
    return torch.backends.cpu.get_cpu_capability() + " AMX" * ("amx" in _facts().get("flags", ""))
