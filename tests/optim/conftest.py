"""Every test of this folder computes by one thread."""

from tests.networks import one_thread

__all__ = ["one_thread"]
