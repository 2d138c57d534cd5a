"""Pickles written before the packages were made name classes where they were then. Here they are found."""

import sys

from mpkernels.amp import mixed_class, policy, scalings
from mpkernels.overflow import ledger, readback, report

_MODULES = {
    "_late": readback,
    "_mixed_class": mixed_class,
    "_overflow_ledger": ledger,
    "_overflow_report": report,
    "_policy": policy,
    "_scaling": scalings,
}


def register() -> None:
    sys.modules.update({f"mpkernels.{old}": module for old, module in _MODULES.items()})
    readback.Late = readback.Readback  # type: ignore[attr-defined]
