"""A stand-in for a CUDA device: its tensors lie in the CPU's memory and say that they are on "cuda:0". A copy to the
host that nobody waits for holds poison until it arrives: when a test says so, or something else waits for the device.
While a graph is captured it refuses what CUDA and torch do, and all that comes after pinned memory was freed."""

import weakref
from contextlib import contextmanager
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("cuda", 0)
_TO, _COPY, _PIN = torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default, torch.ops.aten._pin_memory.default


class LateTensor(torch.Tensor):
    """To C++ it is on "meta", which needs no library."""

    device, is_cuda, is_meta = DEVICE, True, False
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, memory):
        like = {"strides": memory.stride(), "dtype": memory.dtype, "device": "meta"}
        return torch.Tensor._make_wrapper_subclass(cls, memory.shape, **like)

    def __init__(self, memory):
        self.memory = memory

    def data_ptr(self):
        return self.memory.data_ptr()

    def item(self):
        return self.to("cpu").item()

    def tolist(self):
        return self.to("cpu").tolist()

    def __torch_dispatch__(self, *_):
        raise RuntimeError("a tensor of a late device was used without it")


class LateDevice(TorchDispatchMode):
    """While it is on, "cuda" is this device."""

    def __init__(self):
        super().__init__()
        self.is_capturing = self._is_void = False
        self._arrivals = 0
        self._on_their_way = []  # tensors on the host, and what they will hold
        self._pinned_memory = set()

    def arrive(self):
        """Have all that was sent be there."""
        for copy, value in self._on_their_way:
            if copy() is not None:
                copy().copy_(value)
        self._on_their_way.clear()
        self._arrivals += 1

    def event(self):
        return _Event(self)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if self._is_void:
            raise RuntimeError("operation failed due to a previous error during capture: pinned memory was freed")
        kwargs = dict(kwargs or {})
        if op is _PIN or kwargs.pop("pin_memory", False):
            return self._pinned(args[0].clone() if op is _PIN else op(*args, **kwargs))
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        late = {id(each.memory): each for each in tensors if isinstance(each, LateTensor)}
        is_made_here = "device" in kwargs and torch.device(kwargs["device"] or "cpu").type == DEVICE.type
        if not late and not is_made_here:
            return op(*args, **kwargs)
        if op in (_TO, _COPY):
            self._refuse_to_capture(tensors)
            return (self._to if op is _TO else self._copy)(*args, **kwargs)
        if any(each.dim() > 0 and not isinstance(each, LateTensor) for each in tensors):
            raise RuntimeError(f"{op}: expected all tensors on {DEVICE}")
        if is_made_here:
            kwargs["device"] = "cpu"
        results = op(*tree_map(_memory, args), **tree_map(_memory, kwargs))
        return tree_map(lambda it: late.get(id(it), LateTensor(it)) if isinstance(it, torch.Tensor) else it, results)

    def _to(self, source, non_blocking=False, device=None, dtype=None, **kwargs):
        goes_to_host = device is not None and torch.device(device).type != DEVICE.type
        if isinstance(source, LateTensor) and not goes_to_host and dtype in (None, source.dtype):
            return source  # as torch does before it comes here
        copy = _TO(_memory(source), dtype=dtype, **kwargs)
        if not goes_to_host:
            return LateTensor(copy)
        return self._sent(self._pinned(copy) if non_blocking else copy, non_blocking)

    def _copy(self, target, source, non_blocking=False):
        _COPY(_memory(target), _memory(source))
        return target if isinstance(target, LateTensor) else self._sent(target, non_blocking)

    def _sent(self, copy, non_blocking):
        if not non_blocking:
            if self.is_capturing:
                raise RuntimeError("operation not permitted when stream is capturing: the host waits")
            self.arrive()
            return copy
        self._on_their_way.append((weakref.ref(copy), copy.clone()))
        poison = torch.nan if copy.is_floating_point() else -85
        return copy.copy_(~copy) if copy.dtype == torch.bool else copy.fill_(poison)

    def _pinned(self, tensor):
        if self.is_capturing:
            raise RuntimeError("operation not permitted when stream is capturing: pinned memory is taken")
        self._pinned_memory.add(tensor.untyped_storage().data_ptr())
        weakref.finalize(tensor, self._freed)
        return tensor

    def _freed(self):
        self._is_void |= self.is_capturing

    def _refuse_to_capture(self, tensors):
        on_host = [it.untyped_storage().data_ptr() for it in tensors if not isinstance(it, LateTensor)]
        if self.is_capturing and not self._pinned_memory.issuperset(on_host):
            raise RuntimeError("Cannot copy between CPU and CUDA tensors during CUDA graph capture unless it is pinned")


class _Event:
    def __init__(self, device):
        self._device, self._arrivals = device, None

    def record(self, stream):
        self._arrivals = self._device._arrivals

    def query(self):
        if self._device.is_capturing:
            raise RuntimeError("operation not permitted when stream is capturing: an event is asked")
        return self._device._arrivals > self._arrivals


def _memory(it):
    return it.memory if isinstance(it, LateTensor) else it


@contextmanager
def late_device():
    device = LateDevice()
    with (
        mock.patch("torch.cuda._lazy_init"),
        mock.patch("torch.cuda.Event", device.event),
        mock.patch("torch.cuda.current_stream"),
        mock.patch("torch.cuda.is_current_stream_capturing", side_effect=lambda: device.is_capturing),
        device,
    ):
        yield device
