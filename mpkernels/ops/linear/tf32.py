"""Whether fp32 products may round their operands to TF32 on a GPU, as torch's own do where the user allows it."""

import torch

from mpkernels.ops._registry import _library


def uses_tf32() -> bool:
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


# For the C++ kernels: torch's C ABI can't tell them.
_library.define("uses_tf32() -> bool")
_library.impl("uses_tf32", uses_tf32, "CompositeExplicitAutograd")
