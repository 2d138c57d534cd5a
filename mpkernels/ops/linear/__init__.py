"""Ops of linear layers: a layer with its activation, gated layers, and their backwards."""

TRITON = f"{__name__}.linear_triton"  # holds the Triton kernels of all ops here
