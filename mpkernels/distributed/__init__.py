"""Processes that share a training: which hold parts of the grads, and how they agree on norm and skips."""
