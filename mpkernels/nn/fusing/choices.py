"""Keeps for each site of a module what computes it, so that the plain lines of a site that torch computes run at once.

Where torch computes a site in any number of rows and any dtype, a call pays for one look. The next call asks the table
again after ``pin`` and ``tune``, in ``backend``, on another device, with another weight in the first layer, and once a
layer or an activation was set on the module. All that is kept lies in the module, and a copy begins with nothing.
"""

from typing import Any
from weakref import ref

from torch import Tensor, is_grad_enabled
from torch.compiler import is_dynamo_compiling
from torch.nn import Module

from mpkernels import selector
from mpkernels._torch_private.modes import is_any_autocast_enabled
from mpkernels._torch_private.modules import books_of
from mpkernels._torch_private.tracing import is_tracing
from mpkernels.linear import key_and_case
from mpkernels.linear.key_and_case import autocast_dtype, kernel_for
from mpkernels.nn.fusing import calls
from mpkernels.nn.fusing.recognise import is_chain
from mpkernels.ops._dispatcher import forced
from mpkernels.ops.linear.block_kind import Kind, Parameters
from mpkernels.ops.linear.tf32 import uses_tf32

KEPT = "mpkernels_kept"  # the attribute of a fused module that holds its Sites
_MOST_CALLS = 256


class Kept:
    """What is known of one site, or of a loop."""

    __slots__ = "is_ours", "parameters", "quiet", "table_in_force", "weight"

    def __init__(self, table_in_force: Any, parameters: dict[str, Any]) -> None:
        self.table_in_force = table_in_force  # a dict of the selector's, which it replaces where calls must ask again
        self.parameters, self.weight = parameters, ref(parameters["weight"])  # of the first layer
        self.quiet: bool | None = None  # whether torch computes every call on a CPU (True), or elsewhere (False)
        self.is_ours: dict[Any, bool] = {}  # by the call's key


class Sites(dict[str, Kept]):
    """By the site's name."""

    def __reduce__(self) -> tuple[type, tuple[()]]:  # for pickle and copy
        return Sites, ()


def verdict(module: Any, site: str, x: Any) -> bool | None:
    """Return whether the fused op computes this call, or None if no earlier call tells."""
    # Flat, because each function called here slows down small models. Dynamo first: it would make guards of the rest.
    if is_dynamo_compiling() or forced or type(x) is not Tensor:
        return None
    try:
        kept: Kept = module.mpkernels_kept[site]
        if kept.table_in_force is not selector.by_key or kept.parameters["weight"] is not kept.weight():
            return None
    except (AttributeError, KeyError):
        return None
    return False if x.is_cpu is kept.quiet else kept.is_ours.get(_key_of(x, kept.weight()))


def is_ours(
    module: Module,
    site: str,
    kind: str,
    x: Tensor,
    layers: calls.Layers,
    activation: object,
    *options: Any,
    **named: Any,
) -> bool:
    """Return whether the fused op computes this call of plain layers, and keep that for ``verdict``. An activation that
    is a chain of small ops is always fused: it becomes one op of torch's."""
    parameters = books_of(vars(layers[0]))[0]
    if is_tracing() or forced or type(x) is not Tensor or "weight" not in parameters:  # as while FSDP1 computes
        return True  # the op decides
    table_in_force = selector.by_key  # looked up first: another thread may pin a kernel meanwhile
    block, params = calls.block_of(kind, layers, activation, *options, **named)
    if x.dim() == 0 or params.weight.dim() != 2:
        return True  # the op names the error
    if not key_and_case.is_ours(x, *params):
        return False
    found = is_chain(activation) or kernel_for(block, x, params, autocast_dtype(x), has_key=False) != "torch"
    is_quiet = not found and _is_never_ours(block, params)
    _keep(module, site, table_in_force, parameters, x, found, is_quiet)
    return found


def note_on(kind: str, layers: calls.Layers, activation: object, name: Any) -> str:
    """Return what the report adds on a site of these layers."""
    if not _is_never_ours(*calls.block_of(kind, layers, name)):
        return ""
    return ": torch's one op for a chain of small ones" if is_chain(activation) else ": torch is as fast"


def leave_loop(module: Module, loop: str, sites: list[str], x: Any) -> None:
    """Keep that torch computes a loop which begins with this x, after a call in which it has computed all sites."""
    known: Sites = vars(module).get(KEPT, Sites())
    if known.keys() >= {*sites} and type(x) is Tensor and not (is_tracing() or forced):
        first = known[sites[0]]
        is_quiet = all(known[site].quiet is x.is_cpu for site in sites)
        _keep(module, loop, first.table_in_force, first.parameters, x, False, is_quiet)


def _is_never_ours(block: Kind, params: Parameters) -> bool:
    """Return whether torch computes such calls in any number of rows and any dtype. False where nobody knows yet: on
    the meta device, and for what FSDP1 has flattened."""
    device = params.weight.device
    if device.type == "meta" or params.weight.dim() != 2:
        return False
    return selector.is_never_ours(block.op, device, block.activation, params.sizes(block)[1])


def _keep(
    module: Module, site: str, table_in_force: Any, parameters: dict[str, Any], x: Tensor, is_ours: bool, is_quiet: bool
) -> None:
    sites: Sites = vars(module).setdefault(KEPT, Sites())
    kept, weight = sites.get(site), parameters["weight"]
    if (
        kept is None
        or kept.table_in_force is not table_in_force
        or kept.weight() is not weight
        or len(kept.is_ours) >= _MOST_CALLS
    ):
        kept = sites[site] = Kept(table_in_force, parameters)
    kept.quiet = x.is_cpu if is_quiet else None  # of a device, this is the fastest to read
    kept.is_ours[_key_of(x, weight)] = is_ours


def _key_of(x: Tensor, weight: Any) -> Any:
    """Return what may change between calls, and with it what computes them. None for an x that no kernel takes."""
    try:
        facts = x.shape, x.dtype, x.device, x.requires_grad, weight.dtype, weight.requires_grad
        details = (x.stride(), not x.is_cpu and uses_tf32()) if selector.tuned else None  # the table has no such lines
    except RuntimeError:  # nested or sparse
        return None
    return facts, details, is_grad_enabled(), autocast_dtype(x) if is_any_autocast_enabled() else None
