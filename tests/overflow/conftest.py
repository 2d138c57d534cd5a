from tests.networks import one_thread

__all__ = ["one_thread"]  # a fixture that each test of this folder uses
