"""Tells whether fp32 products may round their operands to TF32 on a GPU, as torch's own do where the user allows it."""

import torch


def uses_tf32() -> bool:
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")
