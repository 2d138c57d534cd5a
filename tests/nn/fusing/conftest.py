import sys

import pytest

from tests.networks import one_thread
from tests.nn.fusing import as_diffusers

__all__ = ["one_thread"]  # a fixture that each test of this folder uses


@pytest.fixture(autouse=True)
def _stand_in_for_diffusers(monkeypatch):
    """Let imports of diffusers find the stand-ins: pickle and torch.compile look modules up by name."""
    for name in ("diffusers", "diffusers.models", "diffusers.models.activations"):
        monkeypatch.setitem(sys.modules, name, as_diffusers)
