"""Describes a grad of a skipped step."""

from dataclasses import dataclass
from operator import add

from torch import Tensor

from mpkernels._shared.parameters import order_of_memory
from mpkernels.distributed.parts import first_index, part_of


@dataclass(frozen=True)
class Gradient:
    """The facts about a parameter's grad. Each process describes its own part of a DTensor's grad."""

    name: str
    group: int
    shape: tuple[int, ...]
    dtype: str
    elements: int
    infs: int
    nans: int
    first: tuple[int, ...] | None  #: the index of the first inf or NaN in memory; of a sparse grad, among its values
    largest: float  #: the largest finite magnitude, without the scale
    zeros: float  #: the share of the elements that are 0
    rank: int | None = None  #: the process that holds it, in a report on all processes

    @property
    def is_finite(self) -> bool:
        return self.infs + self.nans == 0


def gradient_of(
    param: Tensor, line: list[float], on_grads: float, names: dict[int, tuple[str, int]], follows_grads: bool
) -> Gradient:
    size, infs, nans, first, largest, zeros = line
    name, group = names.get(id(param), ("a parameter that has left the optimizer", -1))
    return Gradient(
        name=name,
        group=group,
        shape=tuple(param.shape),
        dtype=str(param.dtype).removeprefix("torch."),
        elements=int(size),
        infs=int(infs),
        nans=int(nans),
        first=None if first == float("inf") else _index(param, int(first), int(size), follows_grads),
        largest=largest / on_grads if on_grads else largest,
        zeros=zeros / size,
    )


def _index(whole: Tensor, offset: int, size: int, follows_grads: bool) -> tuple[int, ...]:
    """Return the index of the element at this offset in the memory of the grad, or of this process's part of it."""
    param, grad = part_of(whole), part_of(whole.grad)
    if param.is_complex() and size == 2 * param.numel():
        offset //= 2
    elif size != param.numel():
        return (offset,)
    like = grad if follows_grads and grad is not None and not grad.is_sparse else param
    dims = order_of_memory(like)
    if not like.permute(dims).is_contiguous():
        dims = list(range(like.ndim))
    index = [0] * like.ndim
    for dim in reversed(dims):
        offset, index[dim] = divmod(offset, like.shape[dim])
    return tuple(map(add, index, first_index(whole)))
