"""autocast is torch's, with the machine's device as its default."""

import pytest
import torch

from mpkernels import amp
from mpkernels.amp import autocast
from tests.networks import B16


def test_autocast_is_torchs():
    assert isinstance(autocast(), torch.amp.autocast)
    old = autocast(False, B16, False)
    assert (old._enabled, old.fast_dtype, old._cache_enabled) == (False, B16, False)
    assert autocast("cpu", B16).fast_dtype == autocast(device_type="cpu", dtype=B16).fast_dtype == B16
    assert not autocast("cpu", enabled=False)._enabled
    with pytest.raises(TypeError, match="enabled"):
        autocast(True, enabled=False)
    assert type(autocast()) is torch.amp.autocast

    @autocast("cpu", dtype=B16)
    def double(x):
        return x @ x

    assert double(torch.ones(2, 2)).dtype == B16


def test_autocast_compiles_without_a_graph_break():
    def double(x):
        with autocast(device_type="cpu", dtype=B16):
            return x @ x

    assert torch.compile(double, fullgraph=True, backend="aot_eager")(torch.ones(2, 2)).dtype == B16
    torch.compiler.reset()


def test_torch_amps_names_are_all_there():
    """Skipped with an older torch, whose torch.amp has no __all__."""
    theirs = getattr(torch.amp, "__all__", ("GradScaler", "autocast", "custom_bwd", "custom_fwd"))
    assert set(theirs) <= set(amp.__all__)
    assert amp.custom_fwd is torch.amp.custom_fwd
