"""Helpers that several rooms share: atomic files, saved bytes, the CPU's name."""
