"""``python -m mpkernels demo``: the same small training by torch.amp and by mpkernels, beside each other."""
