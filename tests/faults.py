"""Raises an error at each line and each call of some code, because Ctrl-C or a lack of memory may come anywhere."""

import gc
import itertools
import sys
from pathlib import Path

import torch

import mpkernels

ERRORS = (KeyboardInterrupt, MemoryError, torch.OutOfMemoryError)
# Code in these places counts, line by line and call by call; what it calls elsewhere counts as one call.
COUNTED = (
    str(Path(mpkernels.__file__).parent),
    "/torch/optim/",
    "/torch/amp/",
    "/torch/nn/modules/module.py",
    "/contextlib.py",
)


def _is_counted(frame):
    return any(place in frame.f_code.co_filename.replace("\\", "/") for place in COUNTED)


class _Fault:
    """Raises the error after ``place`` lines and calls of the counted code. Calls into C count, too."""

    def __init__(self, place, error):
        self.place, self.error, self.has_come = place, error, False

    def __enter__(self):
        gc.disable()  # an error in a finalizer would be lost
        sys.setprofile(self._on_call_into_c)
        sys.settrace(self._on_line)

    def __exit__(self, kind, error, traceback):
        sys.settrace(None)
        sys.setprofile(None)
        gc.enable()
        torch.set_grad_enabled(True)  # an interrupted torch.no_grad leaves it off
        return self.has_come  # by flag, not by type: modules wrap errors

    def _count(self):
        if self.place == 0 and not self.has_come:
            self.has_come = True
            raise self.error("injected")
        self.place -= 1

    def _on_line(self, frame, event, argument):
        if not _is_counted(frame):
            return None
        if event in ("call", "line"):
            self._count()
        return self._on_line

    def _on_call_into_c(self, frame, event, function):
        if event == "c_call" and _is_counted(frame):
            self._count()


def faults(every=1):
    """Yield contexts. In the first, the first line of the code inside raises, in the next the second line, and so on,
    in steps of ``every``. In the last context nothing raises."""
    for place, error in zip(itertools.count(0, every), itertools.cycle(ERRORS)):
        yield (fault := _Fault(place, error))
        if not fault.has_come:
            return
