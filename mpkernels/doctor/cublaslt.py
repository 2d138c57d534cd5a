"""What linear_act's CUDA C++ had of cublasLt, which nothing but a GPU can prove."""

from collections.abc import Sequence
from typing import Any

import torch

from mpkernels import _extension
from mpkernels.doctor.selftest import Result


def describe(tests: Sequence[Result]) -> dict[str, Any]:
    """In this process, whose self-test is behind it."""
    products, refusals = _extension.cublaslt_notes() or (0, {})
    failed = any(it.problem for it in tests if (it.op, it.device, it.kernel) == ("linear_act", "cuda", "native"))
    if _extension.cublaslt_notes() is None:
        proof = "not proven here: there are no kernels in CUDA C++"
    elif not torch.cuda.is_available():
        proof = "not proven here: torch sees no GPU"
    elif failed or products == 0:
        proof = "not proven here: the self-test " + ("of linear_act failed" if failed else "made no product with it")
    else:
        proof = f"proven by the self-test: {products} products"
    return {"proof": proof, "fell back": refusals}
