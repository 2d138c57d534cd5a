"""What CUDA C++ had of cublasLt, which nothing but a GPU can prove."""

from collections.abc import Sequence
from typing import Any

import torch

from mpkernels import _extension
from mpkernels.doctor.selftest import Result


def describe(tests: Sequence[Result]) -> dict[str, Any]:
    """In this process, whose self-test is behind it."""
    notes = _extension.cublaslt_notes()
    products, refusals = notes or ({}, {})
    failed = {it.op for it in tests if it.problem and (it.device, it.kernel) == ("cuda", "native")}
    return {
        "proof": {
            op: _proof(op, None if notes is None else products.get(op, 0), op in failed)
            for op in ("linear_act", "linear_dact")
        },
        "fell back": refusals,
    }


def _proof(op: str, products: int | None, failed: bool) -> str:
    if products is None:
        return "not proven here: there are no kernels in CUDA C++"
    if not torch.cuda.is_available():
        return "not proven here: torch sees no GPU"
    if failed or products == 0:
        return "not proven here: the self-test " + (f"of {op} failed" if failed else "made no product with it")
    return f"proven by the self-test: {products} products"
