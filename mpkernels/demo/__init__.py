"""``python -m mpkernels demo``: a small training by torch.amp and by mpkernels, side by side."""
