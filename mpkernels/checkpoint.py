"""Checkpoints of one process, in a file that is there whole or not at all.

torch.load reads the file, too. Behind what torch.save writes come a mark with the version of this format, and a
checksum of all before it.
"""

import copy
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from mpkernels._shared.files import replacing
from mpkernels._torch_private.modules import books_of
from mpkernels.distributed.parts import part_of
from mpkernels.optim.engine import Engine

Undo = Callable[[], None]
_NO_EXTRA = nn.Module.get_extra_state
_REPLACING = (Optimizer.load_state_dict, Engine.load_state_dict)  # which write to no tensor that is there
_MARK, _VERSION = b"mpkernels checkpoint ", b"0001"
_DIGEST = hashlib.sha256
_END = len(_MARK) + len(_VERSION) + _DIGEST().digest_size


def save(path: str | os.PathLike[str], **objects: Any) -> None:
    """Write a checkpoint, or leave the file that is there as it is.

    >>> save("last.pt", model=model, optimizer=optimizer, scaler=scaler, step=step)

    Args:
        path: the file. It changes in a single moment, after everything has reached the disk.
        objects: by name. Of one that has a ``state_dict``, that is saved; other values have to be such as
            ``torch.load(weights_only=True)`` takes: tensors, numbers, strings, and lists and dicts of them.
    """
    states = {name: it.state_dict() if hasattr(it, "state_dict") else it for name, it in objects.items()}
    with replacing(Path(path)) as file:
        summed: Any = _Summed(file)
        torch.save(states, summed)
        summed.write(_MARK + _VERSION)
        file.write(summed.digest.digest())


def load(path: str | os.PathLike[str], map_location: Any = "cpu", **objects: Any) -> dict[str, Any]:
    """Return what ``save`` has written, by name, and hand the state of each given object to its ``load_state_dict``.

    >>> step = load("last.pt", model=model, optimizer=optimizer, scaler=scaler)["step"]

    Raises ValueError, before any object changes, if the file is no checkpoint, or not as it was written, or if a module
    has nested tensors or mkldnn's in its state, to which torch can't load. If an object
    refuses its state, or the loading is interrupted, all objects are as before: parameters and buffers are copied to
    the host meanwhile, and so are the tensors of optimizers that have a ``load_state_dict`` of their own; other
    optimizers get back the states that they had, everything else is set back by its own ``load_state_dict``. An object
    without a ``state_dict`` can't be set back, so it is loaded last.
    """
    path = Path(path)
    _check(path)
    states: dict[str, Any] = torch.load(path, map_location=map_location, weights_only=True)
    if missing := objects.keys() - states.keys():
        raise ValueError(f"checkpoint.load: {path} must have {sorted(missing)}, got {sorted(states)}")
    for name, it in objects.items():
        _refuse_opaque(name, it)
    undos = [_undo_of(it) for it in objects.values() if hasattr(it, "state_dict")]
    try:
        for name, it in sorted(objects.items(), key=lambda pair: not hasattr(pair[1], "state_dict")):
            it.load_state_dict(states[name])
    except BaseException as error:
        _undo_all(undos, error)
        raise
    return states


def _refuse_opaque(name: str, it: Any) -> None:
    """Say which of a module's tensors torch can't load to. One that its ``state_dict`` leaves out stays as it is."""
    if not (isinstance(it, nn.Module) and any(map(_is_opaque, (*it.parameters(), *it.buffers())))):
        return
    for key, value in it.state_dict().items():
        if isinstance(value, Tensor) and _is_opaque(value):
            what = "a nested tensor" if value.is_nested else "mkldnn's"
            raise ValueError(
                f"checkpoint.load: {name} must hold plain tensors, got {what} for {key!r}, to which torch can't load"
            )


def _is_opaque(tensor: Tensor) -> bool:
    return tensor.is_nested or tensor.is_mkldnn


def _undo_all(undos: list[Undo], error: BaseException) -> None:
    """Call each of these. What one of them raises becomes the context of the error, which stays what the user sees."""
    for undo in reversed(undos):
        try:
            undo()
        except BaseException as failure:
            failure.__context__, error.__context__ = error.__context__, failure


def _undo_of(it: Any) -> Undo:
    """Return a function that gives the object back the state that it has now."""
    if isinstance(it, nn.Module):
        return _undo_of_module(it)
    if isinstance(it, Optimizer):
        return _undo_of_optimizer(it)
    before = copy.deepcopy(it.state_dict())
    return lambda: it.load_state_dict(before)


def _undo_of_module(module: nn.Module) -> Undo:
    modules = list(module.modules())
    put_back_tensors = _undo_of_tensors(it for each in modules for it in _own_tensors(each))
    extra = [(it, copy.deepcopy(it.get_extra_state())) for it in modules if type(it).get_extra_state is not _NO_EXTRA]
    # Not what else a module keeps in dicts, which may refuse to be written to.
    dicts = [it for each in modules for it in (*books_of(vars(each)), vars(each))]
    put_back_dicts = _undo_of_dicts(dicts)

    def undo() -> None:
        put_back_tensors()
        put_back_dicts()
        for each, state in extra:
            each.set_extra_state(state)

    return undo


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from nn.Module.parameters(module, recurse=False)
    yield from nn.Module.buffers(module, recurse=False)


def _undo_of_optimizer(optimizer: Optimizer) -> Undo:
    values = [it for each in vars(optimizer).values() for it in (each if isinstance(each, list | tuple) else [each])]
    undos = [_undo_of_optimizer(it) for it in values if isinstance(it, Optimizer)]  # of a wrapper
    if getattr(optimizer.load_state_dict, "__func__", None) not in _REPLACING:
        undos.append(_undo_of_tensors(_tensors_in([vars(optimizer), optimizer.state, optimizer.param_groups])))
    undos.append(_undo_of_dicts([vars(optimizer), optimizer.state, *optimizer.param_groups]))

    def undo() -> None:
        for each in undos:
            each()

    return undo


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for it in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(it)


def _undo_of_tensors(tensors: Iterable[Tensor]) -> Undo:
    """Return a function that writes back what these tensors hold now, where they can be written to."""
    ours = list({id(it): it for it in tensors if _is_writable(it)}.values())
    values = [part_of(it.detach()).to("cpu", copy=True) for it in ours]

    @torch.no_grad()
    def undo() -> None:
        for tensor, value in zip(ours, values, strict=True):
            part_of(tensor).copy_(value)  # not detached: to a detached COO tensor, copy_ gives new parts

    return undo


def _is_writable(tensor: Tensor) -> bool:
    """Return whether it is neither lazy nor shows one element in several places. Only strided ones have strides."""
    return not (
        _is_opaque(tensor)
        or is_lazy(tensor)
        or tensor.is_meta
        or (tensor.layout == torch.strided and 0 in tensor.stride())
    )


def _undo_of_dicts(dicts: Iterable[Any]) -> Undo:
    pairs = [(it, dict(it)) for it in dicts if isinstance(it, dict)]

    def undo() -> None:
        for it, before in pairs:
            it.clear()
            it.update(before)

    return undo


class _Summed:
    """A file that sums up what is written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.digest = file, _DIGEST()

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def _check(path: Path) -> None:
    size, digest = path.stat().st_size, _DIGEST()
    with path.open("rb") as file:
        for start in range(0, max(size - digest.digest_size, 0), 1 << 20):
            digest.update(file.read(min(1 << 20, size - digest.digest_size - start)))
        wanted = file.read()
        file.seek(max(size - _END, 0))
        mark, version = file.read(len(_MARK)), file.read(len(_VERSION))
    if mark != _MARK:
        raise ValueError(
            f"checkpoint.load: {path} must be a file that checkpoint.save wrote, got another one or a part"
        )
    if version != _VERSION:
        raise ValueError(f"checkpoint.load: {path} must be of version {int(_VERSION)}, got {version.decode('latin1')}")
    if digest.digest() != wanted:
        raise ValueError(f"checkpoint.load: {path} must be as it was written, got another checksum: it is damaged")
