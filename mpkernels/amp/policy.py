"""Policies, as in Keras: one name stands for the dtypes of computation and weights, an autocast and a scaler."""

from dataclasses import dataclass
from typing import Any

import torch

from mpkernels._shared.dtypes import dtype_of
from mpkernels._torch_private.devices import has_amx, has_avx512_bf16
from mpkernels.amp.autocasting import autocast, machines_device
from mpkernels.amp.grad_scaler import GradScaler
from mpkernels.amp.mixed import Model, to_mixed

_COMPUTE_DTYPES = {
    "mixed_float16": torch.float16,
    "mixed_bfloat16": torch.bfloat16,
    "float32": torch.float32,
}
_NAMES = {dtype: name for name, dtype in _COMPUTE_DTYPES.items()}


@dataclass(frozen=True)
class Policy:
    """``"mixed_float16"``, ``"mixed_bfloat16"`` or ``"float32"``, and the autocast, scaler and weights that go with it.

    The name of a dtype stands for it, too: ``"fp16"``, ``"bf16"``, ``"bfloat16"``, ``"torch.bfloat16"``, ``"fp32"``.

    >>> policy = Policy("mixed_bfloat16")
    >>> with policy.autocast("cpu"): ...
    """

    name: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", _NAMES.get(dtype_of(self.name), self.name))
        if self.name not in _COMPUTE_DTYPES:
            known = ", ".join(map(repr, (*_COMPUTE_DTYPES, "fp16", "bf16", "fp32")))
            raise ValueError(f"Policy: name must be one of {known}, got {self.name!r}")

    @classmethod
    def best(cls, device: str | torch.device | None = None) -> "Policy":
        """Return the policy that trains fastest on a device, by default the machine's, without a loss in accuracy.

        bf16 wherever hardware multiplies it, because it needs no scaling: CUDA from Ampere on, ROCm, XPU, and CPUs with
        AMX, AVX512_BF16 or Arm's BF16. Else fp16 on a CUDA device with tensor cores, and on MPS, whose first generation
        emulates bf16. Else fp32: a CPU without such instructions widens, multiplies and rounds, which is slower.
        """
        device = torch.device(machines_device() if device is None else device)
        if device.type == "cuda":
            capability = (8, 0) if torch.version.hip else torch.cuda.get_device_capability(device)
            return cls("bf16" if capability >= (8, 0) else "fp16" if capability >= (7, 0) else "fp32")
        if device.type == "cpu":
            arms: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.10 may lack this function
            return cls("bf16" if has_amx() or has_avx512_bf16() or arms.get("bf16", False) else "fp32")
        return cls({"mps": "fp16", "xpu": "bf16"}.get(device.type, "fp32"))

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype that autocast computes in."""
        return _COMPUTE_DTYPES[self.name]

    def autocast(self, device: str | torch.device | None = None) -> torch.amp.autocast:
        """Return an autocast to the policy's dtype; for float32, one that is disabled."""
        options: Any = {"enabled": False} if self.name == "float32" else {"dtype": self.compute_dtype}
        return autocast(_type_of(device), **options)

    def scaler(self, device: str | torch.device | None = None, **options: Any) -> torch.amp.GradScaler:
        """Return an ``mpkernels.amp.GradScaler`` with these options. It is enabled for fp16 alone; the other policies
        need no loss scale."""
        return GradScaler(_type_of(device), enabled=self.name == "mixed_float16", **options)

    def convert(self, model: Model, keep_fp32: str | list[str] | tuple[str, ...] = ()) -> Model:
        """Convert the model by ``to_mixed`` and return it. For float32, return the model unchanged."""
        return model if self.name == "float32" else to_mixed(model, self.compute_dtype, keep_fp32)


def _type_of(device: str | torch.device | None) -> str:
    return torch.device(machines_device() if device is None else device).type


_global_policy = Policy("float32")


def global_policy() -> Policy:
    """Return what ``set_global_policy`` set last; ``Policy("float32")`` at first."""
    return _global_policy


def set_global_policy(policy: Policy | str) -> None:
    """Set the policy that ``global_policy()`` returns. ``find_max_batch_size`` trains under it, and your code may."""
    global _global_policy
    if not isinstance(policy, Policy | str):
        raise TypeError(f"set_global_policy: policy must be a Policy or the name of one, got {policy!r}")
    _global_policy = Policy(policy) if isinstance(policy, str) else policy
