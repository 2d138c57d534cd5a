"""Counts calls of functions, where time would tell little."""

import gc
import sys


def calls_of(run):
    """Return how many of Python's and C's functions are called."""
    calls = 0

    def note(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.collect()
    gc.disable()  # finalizers at random moments would count
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls
