"""What the selector is asked about a call."""

from typing import NamedTuple

import torch


class Case(NamedTuple):
    """What the time of a call depends on."""

    op: str
    device: torch.device
    sizes: tuple[int, ...]  #: features of x, of h, of the result
    dtypes: tuple[torch.dtype, ...]  #: the computing dtype first
    activation: str
    trains: bool
    details: str
    rows: int | None  #: rounded up to a power of two; None where a graph serves any number
    kernels: tuple[str, ...] = ()  #: the available ones, plain torch last

    def __str__(self) -> str:
        dtypes = ",".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
        variant = f"{self.activation}{self.details}{', with grad' if self.trains else ''}"
        sizes = "x".join(map(str, ("any" if self.rows is None else self.rows, *self.sizes)))
        return f"{self.op} {variant} {sizes} {dtypes}"

    def for_all_ranks(self) -> "Case":
        """Return the case without the device's index and the kernels, which differ between ranks."""
        return self._replace(device=torch.device(self.device.type), kernels=())
