"""An entry point of torch.backends, which `import torch` calls at its end: aten then computes on the stand-in."""

import ctypes
import fnmatch
from pathlib import Path

# torch's own functions serve these: they launch no kernel, or none that is used. An asterisk stands for any letters.
KEPT = """
empty.memory_format empty_strided as_strided view view_as_complex view_as_real _reshape_alias unfold alias resize_
record_stream is_set_to _local_scalar_dense _pin_memory is_pinned _efficientzerotensor _has_same_storage_numel copy_
set_ set_.source_* _copy_from* _cudnn_* cudnn_* miopen_* _flash_* _efficient_* _scaled_dot_product* _fused_sdp* _nested*
_cslt* _sparse* _thnn_*
"""


def attach() -> None:
    import torch
    import torch._meta_registrations  # what C++ has no Meta kernels for

    registered = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    names = {name.removeprefix("aten::") for name in registered if name.startswith("aten::")}
    kept = {name for pattern in KEPT.split() for name in fnmatch.filter(names, pattern)}
    replaced = sorted(names - kept)
    ctypes.CDLL(str(Path(__file__).with_name("aten.so"))).standin_attach(" ".join(replaced).encode())
    torch.backends.cudnn.enabled = False
    for kind in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{kind}_sdp")(False)
    torch._C._broadcast_coalesced = _broadcast  # DataParallel asks for it, and NCCL would do it
    torch.cuda.nccl.is_available = lambda tensors: False


def _broadcast(tensors, devices, buffer_size):
    return [[tensor.to(f"cuda:{device}") for tensor in tensors] for device in devices]
