"""fuse(model) computes linear layers, activations and gates by fused ops. All modules stay where they are."""

from types import MethodType

from torch.nn import Module

from mpkernels._shared.call_model import refuse_no_model
from mpkernels._torch_private.modes import without_functions
from mpkernels.nn.fusing.choices import KEPT
from mpkernels.nn.fusing.classes import become, covers_fused_forward, fused_class, is_fused, is_stale, plain_class
from mpkernels.nn.fusing.decision import decide
from mpkernels.nn.fusing.report import FusedSite, FuseReport, LeftSite, SavedBytes

__all__ = ["FuseReport", "FusedSite", "LeftSite", "SavedBytes", "fuse", "unfuse"]


def fuse(model: Module, dry_run: bool = False) -> FuseReport:
    """Have the model compute MLPs, gates and linear layers with activations by mpkernels' fused ops, in place.

    No module is replaced. ``fuse`` rewrites the forward of modules that apply an activation to the output of a
    ``torch.nn.Linear`` (or of GPT-2's ``Conv1D``), such as ``self.act(self.fc1(x))``, and gives these modules a
    subclass with the new forward. Each call checks that the layers are still plain. If a layer has been wrapped,
    quantised, pruned or hooked since, the original line runs. So adapters, quantisers and sharding work before and
    after ``fuse``.

    Args:
        model: any module. Modules that are fused already stay as they are.
        dry_run: report what would be fused, and change nothing.

    Returns:
        A report: ``report.fused``, ``report.left`` with reasons, ``report.saved_bytes(inputs)``; ``print`` it.
    """
    refuse_no_model("fuse", model)
    report, covered = FuseReport(_model=model), list[Module]()
    with without_functions():
        for name, module in model.named_modules():
            if any(it is module for it in covered):
                continue
            kind, plain = type(module), plain_class(type(module))
            recipe, fused, left, inner = decide(module, plain)
            if recipe and (not is_fused(kind) or is_stale(kind)):
                try:
                    report._classes.append((module, plain, fused_class(plain, recipe)))
                except TypeError as error:
                    fused, left, inner = [], [(kind.__name__, f"its class allows no subclass: {error}")], ()
            elif recipe and not covers_fused_forward(kind):  # fused already: saved_bytes compares it, too
                report._classes.append((module, plain, kind))
            report.fused += [FusedSite(name, *entry) for entry in fused]
            report.left += [LeftSite(name, *entry) for entry in left]
            covered += inner
    if not dry_run:
        _install(model, report)
    return report


def _install(model: Module, report: FuseReport) -> None:
    """Give each module its new class, or report why it refuses one. If anything else fails, no module changes."""
    before = [(module, type(module)) for module, _, _ in report._classes]
    names = {module: name for name, module in model.named_modules()}
    try:
        for entry in [*report._classes]:
            module, _, kind = entry
            try:
                become(module, kind)
            except (TypeError, AttributeError) as error:  # another memory layout, or a __class__ of its own
                report._classes.remove(entry)
                refusing = [it for it in report.fused if it.module == names[module]]
                report.fused = [it for it in report.fused if it not in refusing]
                report.left.append(LeftSite(names[module], type(module).__name__, f"takes no other class: {error}"))
    except BaseException:
        for module, kind in before:
            become(module, kind)
        raise


def unfuse(model: Module) -> None:
    """Undo ``fuse``: give each module its own class again. Modules that were never fused stay as they are.

    A class that others have derived since is derived from the plain class instead. It is refused if it has a forward of
    its own, as after ``to_mixed``: undo that first.
    """
    refuse_no_model("unfuse", model)
    fused = [(name, module) for name, module in model.named_modules() if is_fused(type(module))]
    for name, module in fused:
        if covers_fused_forward(type(module)):
            raise ValueError(
                f"unfuse: model must not wrap the forward of a fused module, got {type(module).__bases__} around "
                f"{name or 'the model'}: undo that first"
            )
    for _, module in fused:
        kind, set_forward = type(module), vars(module).get("forward")
        become(module, plain_class(kind))
        vars(module).pop(KEPT, None)
        if getattr(set_forward, "__func__", None) is kind.forward:  # Accelerate leaves it there when it unwraps a model
            object.__setattr__(module, "forward", MethodType(type(module).forward, module))
