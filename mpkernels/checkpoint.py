"""Saves and loads checkpoints of one process, in a file that is there whole or not at all.

torch.load reads the file, too. After torch.save's data come a mark with the version of this format, and a checksum of
all before it.
"""

import hashlib
import io
import os
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import NoneType
from typing import Any, BinaryIO, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.serialization import get_unsafe_globals_in_checkpoint

from mpkernels._shared.files import replacing
from mpkernels._shared.parameters import are_any_sharded, params_of
from mpkernels._shared.tensors_in import tensors_in
from mpkernels._torch_private.sharded import is_fsdp1s
from mpkernels.distributed import processes
from mpkernels.distributed.restoring import restore_at_end

__all__ = ["load", "save"]

_MARK, _VERSION = b"mpkernels checkpoint ", b"0001"
_DIGEST = hashlib.sha256
_END = len(_MARK) + len(_VERSION) + _DIGEST().digest_size
_READABLE = (dict, OrderedDict, list, tuple, Tensor, nn.Parameter, str, int, float, bool, NoneType)  # if all inside is
_NOT_PICKLED = pickle.PicklingError, AttributeError, TypeError  # which pickle raises for what it can't save


def save(path: str | os.PathLike[str], *unnamed: Any, **objects: Any) -> None:
    """Write a checkpoint, or leave the file that is there as it is.

    >>> save("last.pt", model=model, optimizer=optimizer, scaler=scaler, step=step)

    Args:
        path: the file. It changes in a single moment, after everything has reached the disk.
        objects: by name. An object with a ``state_dict`` is saved by it; other values have to be such as
            ``torch.load(weights_only=True)`` takes: tensors, numbers, strings, and lists and dicts of them. Values
            that it wouldn't take are refused; ``torch.serialization.add_safe_globals`` allows more classes.
    """
    _refuse_unnamed("save", unnamed)
    if not objects:
        raise ValueError("checkpoint.save: objects must be given by name, as in model=model, got none")
    states = {name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in objects.items()}
    if processes.are_several():
        _refuse_parts(objects, states)
    with replacing(Path(path)) as file:
        summed: Any = _Summed(file)
        try:
            torch.save(states, summed)
        except _NOT_PICKLED as error:
            _refuse_unreadable(states, str(error))
        summed.write(_MARK + _VERSION)
        file.write(summed.digest.digest())
        file.flush()
        if unsafe := get_unsafe_globals_in_checkpoint(file.name):  # reads no tensor
            _refuse_unreadable(states, ", ".join(unsafe))


def _refuse_unnamed(op: str, unnamed: tuple[Any, ...]) -> None:
    if unnamed:
        got = ", ".join(type(it).__name__ for it in unnamed)
        raise TypeError(f"checkpoint.{op}: objects must be given by name, as in model=model, after the path; got {got}")


def _refuse_unreadable(states: dict[str, Any], why: str) -> NoReturn:
    """Raise, and name the value that can't be saved, or that a load would refuse."""
    visited: set[int] = set()
    found = (_unreadable_in(name, value, visited) for name, value in states.items())
    value: Any
    place, value = next(filter(None, found), ("objects", None))
    if is_lazy(value):
        raise ValueError(f"checkpoint.save: {place} must be initialised, got a lazy parameter; run a forward first")
    got = why if value is None else f"{type(value).__module__}.{type(value).__qualname__}"
    raise TypeError(
        f"checkpoint.save: {place} must be a tensor, number, string, list, dict or another value that load reads, got "
        f"{got}; convert it (NumPy's values by tolist(), a path by str, a Namespace by vars)"
    )


def _unreadable_in(place: str, value: Any, visited: set[int]) -> tuple[str, Any] | None:
    """Return the innermost value that a load would refuse, and its place."""
    if id(value) in visited:
        return None
    visited.add(id(value))
    for inner_place, inner in _inside(place, value):
        if found := _unreadable_in(inner_place, inner, visited):
            return found
    if type(value) in _READABLE:
        return None
    data = io.BytesIO()
    try:
        torch.save(value, data)
    except _NOT_PICKLED:
        return place, value
    data.seek(0)
    return (place, value) if get_unsafe_globals_in_checkpoint(data) else None


def _inside(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"a key of {place}", key) for key in value)
        yield from ((f"{place}[{key!r}]", inner) for key, inner in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"{place}[{i}]", inner) for i, inner in enumerate(value))
    if type(value) in _READABLE:  # torch.save keeps what a user has set on a tensor
        yield from ((f"{place}.{name}", inner) for name, inner in getattr(value, "__dict__", {}).items())


def _refuse_parts(objects: dict[str, Any], states: dict[str, Any]) -> None:
    """Raise if this process holds only a part of an object: all processes would write the same file."""
    for name, value in objects.items():
        params = params_of(value) if isinstance(value, Optimizer) else ()
        if are_any_sharded(tensors_in(states[name])) or any(map(is_fsdp1s, params)):
            raise ValueError(
                f"checkpoint.save: {name} must lie in this process whole, got a part, as FSDP and tensor parallelism "
                "make them; torch.distributed.checkpoint saves the parts of all processes"
            )


def load(path: str | os.PathLike[str], *unnamed: Any, map_location: Any = "cpu", **objects: Any) -> dict[str, Any]:
    """Return what ``save`` has written, by name, and hand the state of each given object to its ``load_state_dict``.

    >>> step = load("last.pt", model=model, optimizer=optimizer, scaler=scaler)["step"]

    Raises, before any object changes, if the file is no checkpoint, or not as it was written. If an object
    refuses its state, or the loading is interrupted, all objects are as before: meanwhile the host keeps a copy of the
    parameters, buffers and states; objects that are neither modules nor optimizers are set back by their own
    ``load_state_dict``. An object without a ``state_dict`` can't be set back, so it is loaded last.
    """
    _refuse_unnamed("load", unnamed)
    path = Path(path)
    _check(path)
    states: dict[str, Any] = torch.load(path, map_location=map_location, weights_only=True)
    if missing := objects.keys() - states.keys():
        raise ValueError(f"checkpoint.load: {path} must have {sorted(missing)}, got {sorted(states)}")
    for name, value in objects.items():
        if not hasattr(value, "load_state_dict"):
            got = f"got {type(value).__name__}; values are in the dict that load returns"
            raise TypeError(f"checkpoint.load: {name} must have a load_state_dict, {got}")
    names = sorted(objects, key=lambda name: not hasattr(objects[name], "state_dict"))
    with ExitStack() as undo:
        for name in names:
            if hasattr(objects[name], "state_dict"):
                restore_at_end(undo, objects[name])
        for name in names:
            objects[name].load_state_dict(states[name])
        undo.pop_all()
    return states


class _Summed:
    """Passes writes on to a file, and computes the checksum of all data."""

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
            f"checkpoint.load: {path} must be a file that checkpoint.save wrote, got another one or a part; "
            "torch.load reads what torch.save wrote"
        )
    if version != _VERSION:
        raise ValueError(f"checkpoint.load: {path} must be of version {int(_VERSION)}, got {version.decode('latin1')}")
    if digest.digest() != wanted:
        raise ValueError(f"checkpoint.load: {path} must be as it was written, got another checksum: it is damaged")
