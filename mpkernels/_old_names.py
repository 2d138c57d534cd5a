"""Registers modules under their old names, so that old pickles load and old imports work."""

import sys

from mpkernels.amp import mixed_class, policy, scalings
from mpkernels.ops.step import split
from mpkernels.optim import readback
from mpkernels.overflow import ledger, report

_MODULES = {
    "_late": readback,
    "_mixed_class": mixed_class,
    "_overflow_ledger": ledger,
    "_overflow_report": report,
    "_policy": policy,
    "_scaling": scalings,
    "ops.split": split,
    "overflow.readback": readback,
}


def register() -> None:
    sys.modules.update({f"mpkernels.{old}": module for old, module in _MODULES.items()})
    readback.Late = readback.Readback  # type: ignore[attr-defined]
