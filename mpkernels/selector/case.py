"""A case that the selector is asked for, and what it has chosen."""

from typing import NamedTuple

import torch


class Case(NamedTuple):
    """What the time of a call depends on. ``rows`` is rounded up to a power of two."""

    op: str
    device: torch.device
    sizes: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    variant: str
    rows: int | None
    kernels: tuple[str, ...] = ()  # that are to be had; with others, another may be the fastest

    def __str__(self) -> str:
        dtypes = ",".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
        return f"{self.op} {self.variant} {self.rows}x{'x'.join(map(str, self.sizes))} {dtypes}"

    def key(self) -> str:
        """Return the description that the disk knows it by."""
        return f"{self} of {' '.join(self.kernels)}"

    def anywhere(self) -> "Case":
        """Return the case on no device and with no kernels in particular: other ranks have others."""
        return self._replace(device=torch.device(self.device.type), kernels=())


class Choice(NamedTuple):
    name: str
    left_out: dict[str, str]  # why, of each kernel that must not be used

    def __str__(self) -> str:
        """As users are shown it."""
        return "; ".join((self.name, *(f"without {kernel}: {reason}" for kernel, reason in self.left_out.items())))
