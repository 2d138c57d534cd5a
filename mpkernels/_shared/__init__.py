"""Helpers that several rooms share: optimizers' tensors, tables, atomic files, saved bytes, the CPU's name."""
