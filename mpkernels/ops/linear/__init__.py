"""Ops of linear layers: a layer with its activation, gated layers, and their backwards."""
