"""``python -m mpkernels demo``: the same small training by torch.amp and by mpkernels, beside each other."""

from mpkernels.demo.command import main

__all__ = ["main"]
