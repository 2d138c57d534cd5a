"""Suggests what to look at next after a skipped step."""

from collections.abc import Sequence

from mpkernels.overflow.find_nonfinite import FirstNonFinite
from mpkernels.overflow.gradient import Gradient


def advise_on_forward(first: FirstNonFinite | None) -> str:
    """Return a suggestion from what ``find_nonfinite`` has found in the forward of the skipped step."""
    if first is None:
        return (
            "Every module's output was finite: the loss, or the backward pass under too high a loss scale, made the "
            "first inf or NaN."
        )
    if not first.has_finite_weights:
        return f"The weights of {first} are not finite: an earlier step has spoiled them. Go back to a checkpoint."
    if first.had_finite_inputs:
        return (
            f"{first} was the first to give an inf or NaN, of finite inputs. In fp16, compute it in fp32 or bf16; else "
            "look at what it computes: a division, a root, a logarithm, an exponential."
        )
    return f"{first} was the first module to give an inf or NaN, and got it as an input: look at the data."


def advise_on_gradients(gradients: Sequence[Gradient], culprits: Sequence[Gradient], scale: float | None) -> str:
    """Return a suggestion from the gradients of the skipped step."""
    if not culprits:
        return (
            "No gradient here is inf or NaN: one of another process is, or one was whose parameter has left the "
            "optimizer, or their norm is beyond fp32 once a scale below 1 is taken off."
        )
    if len(culprits) > 1 and all(it.nans > 0 for it in gradients):
        has_scale = scale is not None and scale > 1
        high = f", unless the scale of {scale:g} is far too high: see if it falls" if has_scale else ""
        return (
            f"Every gradient holds NaN, so the loss itself, or an input, is inf or NaN{high}. Run a forward pass under "
            "mpkernels.amp.find_nonfinite(model)."
        )
    if scale is None or scale <= 1:
        return f"The loss scale is not to blame: look at {culprits[0].name} and what follows it in the forward pass."
    if with_nans := [it.name for it in culprits if it.nans]:
        return (
            f"NaN appears from {with_nans[0]} on, as where an inf meets a 0: the scale may be too high. If NaN stays "
            "while the scale falls, run find_nonfinite(model)."
        )
    return (
        f"Only infs: the scale of {scale:g} was too high. A dynamic scale backs off by itself; now and then that is "
        "normal."
    )
