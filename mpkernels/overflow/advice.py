"""Suggests what to look at next after a skipped step."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from mpkernels.overflow.find_nonfinite import find_nonfinite
from mpkernels.overflow.gradient import Gradient

SMALLEST_NORMAL, SMALLEST = torch.finfo(torch.float16).tiny, 2.0**-24  # of fp16
MANY_ZEROS = 0.5
MANY_IN_A_ROW = 5


class Findings(NamedTuple):
    """The facts that a suggestion is based on; OverflowReport explains each field."""

    gradients: list[Gradient]
    culprits: list[Gradient]
    scale: float | None
    zeros: float
    skips_in_a_row: int | None


def advise(findings: Findings, model: torch.nn.Module | None, found: find_nonfinite | None) -> str:
    sentences = [*(_of_gradients(findings) if found is None else _of_forward(found)), *_of_zeros(findings)]
    if model is not None and findings.culprits:
        sentences += _of_eps(model)
    return " ".join(sentences)


def _of_forward(found: find_nonfinite) -> Iterator[str]:
    first = found.first
    if first is None:
        yield "Every module's output was finite: the loss or the backward pass made the first inf or NaN."
    elif not first.has_finite_weights:
        yield f"The weights of {first} are not finite: an earlier step has spoiled them. Go back to a checkpoint."
    elif first.had_finite_inputs:
        yield f"{first} was the first to give an inf or NaN, of finite inputs: compute it in fp32 or bf16."
    else:
        yield f"{first} was the first module to give an inf or NaN, and got it as an input: look at the data."


def _of_gradients(findings: Findings) -> Iterator[str]:
    culprits, scale = findings.culprits, findings.scale
    if not culprits:
        yield (
            "No gradient here is inf or NaN: one of another process is, or one was whose parameter has left the "
            "optimizer, or their norm is beyond fp32 once a scale below 1 is taken off."
        )
    elif all(it.nans > 0 for it in findings.gradients) and len(culprits) > 1:
        yield (
            "Every gradient holds NaN, so the loss itself, or an input, is inf or NaN, and no scale will help: run a "
            "forward pass under mpkernels.amp.find_nonfinite(model)."
        )
    elif scale is None:
        yield f"There is no loss scale to blame: look at {culprits[0].name} and what follows it in the forward pass."
    elif scale <= 1:
        yield (
            f"At a scale of {scale:g} it is not the scale: look at {culprits[0].name} and what follows it in the "
            "forward pass, and compute that in fp32 or bf16."
        )
    elif any(it.nans for it in culprits):
        yield (
            f"NaN appears from {next(it.name for it in culprits if it.nans)} on, as where an inf meets a 0: the scale "
            "may be too high. If NaN stays while the scale falls, run find_nonfinite(model)."
        )
    else:
        yield (
            f"Only infs: the scale of {scale:g} was too high. A dynamic scale backs off by itself; now and then that "
            "is normal."
        )
    if scale is not None and scale > 1 and (findings.skips_in_a_row or 0) >= MANY_IN_A_ROW:
        yield f"It was skip {findings.skips_in_a_row} in a row: a lower init_scale would save them."


def _of_zeros(findings: Findings) -> Iterator[str]:
    if findings.zeros < MANY_ZEROS:
        return
    zeros = f"{findings.zeros:.0%} of the elements are 0"
    if any(it.infs for it in findings.culprits) and (findings.scale or 0) > 1:
        yield f"{zeros}: if they underflow while others overflow, no scale fits all, but bf16 would."
    else:
        yield f"{zeros}: unless they belong there, as in embeddings, they underflow, and the scale is too low."


def _of_eps(model: torch.nn.Module) -> Iterator[str]:
    """Yield advice on modules whose eps is too small for fp16. torch's own layers compute in fp32, so their eps is only
    lost if fp16 rounds it to 0."""
    lost, coarse = [], []
    for name, module in model.named_modules():
        eps = getattr(module, "eps", getattr(module, "variance_epsilon", None))
        is_fp16 = any(it.dtype == torch.float16 for it in module.parameters(recurse=False))
        if not isinstance(eps, float) or not is_fp16:
            continue
        if 0 < eps < SMALLEST:
            lost.append(name)
        elif eps < SMALLEST_NORMAL and not type(module).__module__.startswith("torch.nn."):
            coarse.append(name)
    if lost:
        yield f"eps of {_some(lost)} is 0 in fp16, whose smallest number is 6e-08: raise it."
    if coarse:
        yield f"eps of {_some(coarse)} is below fp16's normal range, 6.1e-05: raise it, or compute in fp32."


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
