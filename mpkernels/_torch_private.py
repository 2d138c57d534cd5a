"""Every private name of torch's that this package reads: why, and what happens where a torch lacks it.

What is missing has a stand-in here, on the safe side: all works, some of it slower or with a refusal that says so.
GradScaler also overrides its parent's own methods (``_unscale_grads_``, ``_check_inf_per_device``,
``_lazy_init_scale_growth_tracker``), calls ``_check_scale_growth_tracker``, and keeps its books (``_enabled``,
``_scale``, ``_growth_interval``, ``_per_optimizer_states``), as torch's ShardedGradScaler does.
"""

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import reduce
from itertools import chain
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks


def _find(module: str, name: str, otherwise: Any) -> Any:
    try:
        return reduce(getattr, name.split("."), importlib.import_module(module))
    except (AttributeError, ImportError):
        return otherwise


Function = TypeVar("Function", bound=Callable[..., Any])


class _NoClass:
    """A class without instances, in place of a missing one."""


def _maybe() -> bool:
    return True


# Whether a tracer, mode or transform observes the ops that are called. Without them: assumed so, and torch computes.
are_transforms_active: Callable[[], bool] = _find("torch._C", "_are_functorch_transforms_active", _maybe)
count_dispatch_modes: Callable[[], int] = _find("torch._C", "_len_torch_dispatch_stack", _maybe)
count_function_modes: Callable[[], int] = _find("torch._C", "_len_torch_function_stack", _maybe)
_function_mode_at: Callable[[int], Any] = _find("torch._C", "_get_function_stack_at", lambda at: None)
_DeviceContext: type = _find("torch.utils._device", "DeviceContext", _NoClass)
# Hides what is done from function modes and tensors of subclasses. Without it: they see what fuse looks at.
without_functions: Any = _find("torch._C", "DisableTorchFunction", nullcontext)
_mode_of: Callable[[Any], Any] = _find("torch._C", "_get_dispatch_mode", lambda kind: kind)
_kinds_of_modes: Any = _find("torch._C", "_TorchDispatchModeKey", None)
is_jit_tracing: Callable[[], bool] = _find("torch._C", "_is_tracing", _maybe)

# Quicker than their public twins, which in a small layer count.
is_any_autocast_enabled: Callable[[], bool] = _find("torch._C", "_is_any_autocast_enabled", _maybe)
is_deterministic: Callable[[], bool] = _find(
    "torch._C", "_get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled
)

# A stand-in that torch.compile and torch.export trace with. Without it: torch computes what they trace.
FakeTensor: type = _find("torch._subclasses.fake_tensor", "FakeTensor", _NoClass)

# Hide ops from dispatch modes and transforms. Without them: modes see these ops, too.
_without_dispatch_modes: Any = _find("torch._C", "_DisableTorchDispatch", nullcontext)
_without_transforms: Any = _find("torch._C", "_DisableFuncTorch", nullcontext)
_may_hook_saved: Callable[[], bool] = _find("torch._C", "_autograd._saved_tensors_hooks_is_enabled", _maybe)

# The dispatcher below autograd. Without the first: a list of tensors goes through Python twice. Without the second: an
# op's own call tells autograd what has changed, and torch.ops doesn't.
below_autograd: Any = _find("torch._C", "_AutoDispatchBelowADInplaceOrView", None)
keys_below_autograd: Any = _find("torch._C", "_after_ADInplaceOrView_keyset", None)
# Whether C++ has attached a kernel. Without it: the package takes none of them for there.
has_kernel: Callable[[str, str], bool] = _find(
    "torch._C", "_dispatch_has_kernel_for_dispatch_key", lambda name, key: False
)


def find_kernel(op: str, key: str) -> Callable[..., Any] | None:
    """Return the kernel that C++ has attached to an op, to be called directly. Without the function: nothing, and where
    it can't run on one of the machine's devices, the reference runs on the others, too."""
    find, keys = _find("torch.library", "get_kernel", None), _find("torch._C", "DispatchKeySet", None)
    own_key = _find("torch._C", f"DispatchKey.{key}", None)
    if None in (find, keys, own_key):
        return None
    call = find(op, key).call_boxed
    return lambda *arguments: call(keys(own_key), *arguments)


def when_cuda_begins(call: Callable[[], None]) -> None:
    """Call this once torch has begun to use CUDA, but nobody else has, or now if it has. Without the queue: only if it
    has, and otherwise the first launch tells what can't run on a device."""
    queue = _find("torch.cuda", "_lazy_call", None)
    if queue is not None and torch.backends.cuda.is_built():
        queue(call)
    elif torch.cuda.is_initialized():
        call()


# Grads of many parameters in one call. Without it: in as many.
foreach_mul_: Callable[[list[Tensor], Tensor], object] = _find(
    "torch", "_foreach_mul_", lambda tensors, factor: [each.mul_(factor) for each in tensors]
)

# A number for each of many tensors in one launch. Without it: in as many.
foreach_add_: Callable[[list[Tensor], list[int]], object] = _find(
    "torch",
    "_foreach_add_",
    lambda tensors, numbers: [it.add_(n) for it, n in zip(tensors, numbers, strict=True)],
)

# A view that autograd takes for none, so that users may change the result in place. Without it: a copy.
unsafe_view: Callable[[Tensor, Sequence[int]], Tensor] = _find(
    "torch", "ops.aten._unsafe_view", lambda tensor, shape: tensor.view(shape).clone()
)

# The op that casts. Without it: memory_report counts no casts of autocast's.
to_copy: Any = _find("torch", "ops.aten._to_copy.default", None)

# What a sparse grad holds, though it may hold an index twice. Without it: torch asks for a coalesced one.
values_of: Callable[[Tensor], Tensor] = _find("torch", "Tensor._values", Tensor.values)

# What the names of torch's own ops that look at grads have in them. Without such ops: the profile counts ours alone.
LOOKS_AT_GRADS = ("_amp_", "_foreach_norm")

# What multiplies bf16 here. Without them: Policy.best takes a CPU for one that doesn't.
has_amx: Callable[[], bool] = _find("torch.cpu", "_is_amx_tile_supported", lambda: False)
has_avx512_bf16: Callable[[], bool] = _find("torch.cpu", "_is_avx512_bf16_supported", lambda: False)

# The parametrization of torch.nn.utils.parametrizations.spectral_norm. Without it: to_mixed needs keep_fp32 there.
SpectralParametrization: type = _find("torch.nn.utils.parametrizations", "_SpectralNorm", _NoClass)

# What all ops are told to. Without it: memory_report counts nothing in a forward on a CPU.
DispatchMode: Any = _find("torch.utils._python_dispatch", "TorchDispatchMode", nullcontext)
leaves_of: Callable[[Any], list[Any]] = _find("torch.utils._pytree", "tree_leaves", lambda tree: [tree])
map_leaves: Callable[..., Any] = _find("torch.utils._pytree", "tree_map", lambda function, tree: function(tree))


def flat_param_handle() -> type:
    """FSDP1's book of a flat parameter. Without it: FSDP's process group must be given."""
    found: type = _find("torch.distributed.fsdp._flat_param", "FlatParamHandle", _NoClass)
    return found


def hooks_of_loading(optimizer: Any) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the user's hooks that run before and after load_state_dict. Without the attributes: none, and torch calls
    the hooks with the stand-in that it loads."""
    before = getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", {})
    return before, getattr(optimizer, "_optimizer_load_state_dict_post_hooks", {})


def is_fsdp1s(param: Tensor) -> bool:
    """Return whether FSDP1 made this of other parameters. Without the mark: none is, and the group must be given."""
    return bool(getattr(param, "_fsdp_flattened", False))


# What runs the backward of a Python function. Without it: no backward seems to run inside another.
_function_backward: Any = _find("torch.autograd.function", "BackwardCFunction.apply", None)


def is_backward_nested() -> bool:
    """Return whether the backward that calls this was started inside another one, by a function's own backward, as
    reentrant checkpoints do."""
    code, frame = getattr(_function_backward, "__code__", None), sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def parts_in_place(tensors: Iterable[Any]) -> list[Any]:
    """Return the tensor that each DTensor holds; None for others. Without the attribute: None, so that a method of
    theirs makes a new view of each parameter at each call, and AdamW plans each step anew."""
    return [getattr(it, "_local_tensor", None) for it in tensors]


def originals_of(flat: Any) -> list[Tensor]:
    """Return the parameters that FSDP1 made views of its flat one. Without its lists: none, and the group must be
    given."""
    return [*(getattr(flat, "_params", None) or ()), *(getattr(flat, "_shared_params", None) or ())]


def version_of(tensor: Tensor) -> object:
    """Return what differs once a tensor has been changed in place. Without torch's counter: something new each time, so
    that nothing is kept for a tensor that might have changed."""
    version = getattr(tensor, "_version", None)
    return object() if version is None else version


def base_of(tensor: Tensor) -> Tensor | None:
    """Return what this is a view of. Without the attribute: nothing, and a transposed weight is cast in each call."""
    return getattr(tensor, "_base", None)


def storage_of(tensor: Tensor) -> int:
    """Return a number that tensors in the same storage share. Without its address: that of the memory, which tensors on
    the meta device have none of."""
    storage = tensor.untyped_storage()
    return int(getattr(storage, "_cdata", None) or storage.data_ptr())


def before_compile(module: torch.nn.Module) -> torch.nn.Module | None:
    """Return what torch.compile wrapped here. Without the attribute: nothing, and warm_up runs the compiled module."""
    return getattr(module, "_orig_mod", None)


def pre_hooks_of(module: torch.nn.Module) -> list[Any]:
    """Return what is called before a forward. Without the book: nothing, and under torch.nn.utils.spectral_norm
    to_mixed needs keep_fp32."""
    return list(getattr(module, "_forward_pre_hooks", {}).values())


_hooks_of_all_modules: tuple[Any, ...] = tuple(
    _find("torch.nn.modules.module", f"_global_{kind}_hooks", {})
    for kind in ("forward", "forward_pre", "backward", "backward_pre")
)


def are_all_modules_hooked() -> bool:
    """Return whether hooks run around the forward of each module. Without torch's books of them: no."""
    forward, forward_pre, backward, backward_pre = _hooks_of_all_modules
    return bool(forward or forward_pre or backward or backward_pre)


_hooks_of_all_steps: tuple[Any, ...] = tuple(
    _find("torch.optim.optimizer", f"_global_optimizer_{kind}_hooks", {}) for kind in ("pre", "post")
)


def hooks_around_step(optimizer: Any) -> Iterator[Any]:
    """Return the hooks of an optimizer's step, its own and those of all. Without torch's books of them: none, and under
    a scaler they see scaled grads."""
    own = (getattr(optimizer, f"_optimizer_step_{kind}_hooks", {}) for kind in ("pre", "post"))
    return chain.from_iterable(book.values() for book in (*own, *_hooks_of_all_steps))


def post_hooks_of_step(optimizer: Any) -> list[Any]:
    """Return what is called after an optimizer's own step. Without the book: nothing, and Metrics miss a step that a
    scaler has skipped, where there are hooks of others."""
    return list(getattr(optimizer, "_optimizer_step_post_hooks", {}).values())


# What a module calls itself by, beside ``__call__``. Without it: that alone is looked at.
CALLED_BY = tuple(name for name in ("__call__", "_call_impl") if hasattr(torch.nn.Module, name))


def books_of(own: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a module's parameters, buffers and children as its ``__dict__`` has them, so that no parametrization is
    run. Without these books: nothing, and nothing is fused."""
    return [own.get(book, {}) for book in ("_parameters", "_buffers", "_modules")]


def runs_forward_alone(module: torch.nn.Module) -> bool:
    """Return whether a call of the module runs its class's forward and no hooks of its own. Without the books of hooks:
    it doesn't, and nothing is fused."""
    own = vars(module)
    if (
        own.get("_forward_hooks", True)
        or own.get("_forward_pre_hooks", True)
        or own.get("_backward_hooks", True)
        or own.get("_backward_pre_hooks", True)
        or own.get("_compiled_call_impl") is not None
        or "_call_impl" in own
    ):
        return False
    if "forward" not in own and not torch.compiler.is_compiling():  # which notices a forward that comes later
        return True
    forward = module.forward  # as torch.compile can follow it: of getattr(forward, "__func__", None) it makes None
    return isinstance(forward, MethodType) and forward.__func__ is type(module).forward and forward.__self__ is module


def is_function_mode_active() -> bool:
    """Return whether a TorchFunctionMode sees the functions of torch that are called. The one of a default device looks
    at those alone that make tensors. Without the stack's entries: each counts."""
    for at in range(count_function_modes()):  # noqa: SIM110, for torch.compile
        if type(_function_mode_at(at)) is not _DeviceContext:
            return True
    return False


def root_mesh(mesh: Any) -> Any:
    """Return the mesh that this one is a slice of. Without the method: itself, so that parameters on several slices
    need a process_group."""
    find = getattr(mesh, "_get_root_mesh", None)
    return mesh if find is None else find()


def offsets_of_part(shape: Any, mesh: Any, placements: Any) -> tuple[int, ...]:
    """Return where this process's part of a DTensor begins. Without the function: at 0, so that a report's indices are
    those within the part."""
    find = _find("torch.distributed.tensor._utils", "compute_local_shape_and_global_offset", None)
    return (0,) * len(shape) if find is None else tuple(find(shape, mesh, placements)[1])


def derives_forward() -> bool:
    """Return whether forward-mode derivatives are computed. Without the level: as if they were."""
    return bool(getattr(forward_ad, "_current_level", 0) >= 0)


def is_exporting() -> bool:
    """Return whether torch.export traces. Without the flag: what is_exporting() says, which is true of all that an
    older torch compiles."""
    flag = getattr(torch.compiler, "_is_exporting_flag", None)
    return torch.compiler.is_exporting() if flag is None else bool(flag)


def constant_in_graphs(function: Function) -> Function:
    """Have torch.compile call this while it traces, as torch.compiler.assume_constant_result does, which first imports
    what compiles: a second, also where nothing does. Without the mark: it is traced, as any function."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def uncompiled() -> Any:
    """Have what torch.compile has compiled run as it was written. Where nothing has imported it, nothing is."""
    is_there = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if is_there else nullcontext()


def may_be_compiled() -> bool:
    """Return whether something has imported torch.compile, which takes a second."""
    return torch.compiler.is_compiling() or "torch._dynamo" in sys.modules


def as_written(name: str, function: Function) -> Function:
    """Return a function that torch.compile runs as it is, with all that it calls, or refuses with fullgraph=True."""
    if torch.compiler.is_compiling():
        raise RuntimeError(
            f"{name} of DTensors must not be part of a full graph: torch.compile can't trace their meshes"
        )
    written: Function = torch.compiler.disable(function)
    return written


_TRACING = [getattr(_kinds_of_modes, name, None) for name in ("FAKE", "PROXY", "FUNCTIONAL")]


def is_tracing() -> bool:
    """Return whether torch writes down what is called: then a tensor is a stand-in, or would be a graph's constant."""
    return (
        torch.compiler.is_compiling()
        or are_transforms_active()
        or (count_dispatch_modes() > 0 and any(kind is None or _mode_of(kind) is not None for kind in _TRACING))
    )


@contextmanager
def unseen() -> Iterator[None]:
    """Hide everything inside this context from dispatch modes, and from activation checkpointing, which counts saved
    tensors."""
    hooks = saved_tensors_hooks(_same, _same) if _may_hook_saved() else nullcontext()
    with _without_dispatch_modes(), hooks:
        yield


def _same(tensor: Tensor) -> Tensor:
    return tensor


@contextmanager
def for_real() -> Iterator[None]:
    """Hide everything inside this context from dispatch modes and transforms. Finalizers need it, because they may run
    at any time."""
    with _without_dispatch_modes(), _without_transforms():
        yield
