"""Lightning Fabric's loop with the precision plugin, against the real library."""

import warnings
from unittest import mock

import pytest
import torch
from torch.testing import assert_close

from mpkernels import Metrics, memory_report
from mpkernels.amp import GradScaler, to_full, to_mixed
from mpkernels.optim import AdamW
from tests.networks import B16, F16, batch, network

pytest.importorskip("lightning", reason="needs the extra integrations")
pytest.importorskip("accelerate", reason="needs the extra integrations")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from accelerate import Accelerator
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.precision import MixedPrecision as FabricsPrecision

    from mpkernels.integrations.fabric import MixedPrecision
    from tests.integrations import test_integration_lightning as lightning
    from tests.integrations.test_integration_lightning import BATCHES, LR, MAX_NORM

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own
CLIPS = {"norm": {"max_norm": MAX_NORM, "error_if_nonfinite": False}, "value": {"clip_val": MAX_NORM}}


def by_fabric(kind, plugin, clip):
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    net = network()
    model, optimizer = fabric.setup(net, kind(net.parameters(), lr=LR))
    for seed in range(BATCHES):
        inputs, targets = batch(seed)
        optimizer.zero_grad()
        fabric.backward((model(inputs).float() - targets).square().mean())
        fabric.clip_gradients(model, optimizer, **CLIPS[clip])
        optimizer.step()
    return net, optimizer


@pytest.mark.parametrize("kind", lightning.KINDS.values(), ids=lightning.KINDS)
@pytest.mark.parametrize(("precision", "dtype"), [("16-mixed", F16), ("bf16-mixed", B16)])
@pytest.mark.parametrize("clip", CLIPS)
def test_clipping_works(kind, precision, dtype, clip):
    plugin = MixedPrecision(precision, "cpu")
    net, _ = by_fabric(kind, plugin, clip)
    model, _ = lightning.by_hand(dtype, lightning.CLIPS[clip])
    assert_close(net.state_dict(), model.state_dict(), rtol=0, atol=LR / 20)
    assert isinstance(plugin.scaler, GradScaler) == (dtype == F16)


def test_without_the_plugin_fabric_refuses_in_fp16_and_clips_in_bf16():
    with pytest.raises(NotImplementedError, match="not implemented for optimizers handling the unscaling"):
        by_fabric(AdamW, FabricsPrecision("16-mixed", "cpu"), "norm")
    net, _ = by_fabric(AdamW, FabricsPrecision("bf16-mixed", "cpu"), "norm")
    model, _ = lightning.by_hand(B16, lightning.CLIPS["norm"])
    assert_close(net.state_dict(), model.state_dict(), rtol=0, atol=LR / 20)


MADE_BY = {
    "fabric": lambda inner: Fabric(accelerator="cpu", devices=1).setup_optimizers(inner),
    "accelerate": lambda inner: Accelerator(cpu=True).prepare(inner),
}


@pytest.mark.parametrize("prepare", MADE_BY.values(), ids=MADE_BY)
def test_a_model_is_converted_and_converted_back_with_the_optimizer_that_a_library_made(prepare):
    net = network()
    inner = AdamW(net.parameters(), lr=LR)
    optimizer = prepare(inner)
    (net(batch(0)[0]) - batch(0)[1]).square().mean().backward()
    optimizer.step()
    before = {name: it.clone() for name, it in net.state_dict().items()}
    to_mixed(net, optimizer=optimizer)
    assert net[0].weight.dtype == B16
    report = memory_report(net, optimizer)
    masters = 2 * sum(it.numel() for it in net.parameters() if it.dtype == B16)
    assert report.predicted["masters"] == report.measured["masters"] == masters
    to_full(net, optimizer)
    assert_close(net.state_dict(), before, rtol=0, atol=0)
    assert inner._plans == []  # the inner optimizer, not its wrapper, has noticed that its parameters changed
    with pytest.raises(TypeError, match=r"^to_mixed: optimizer must be AdamW, .*, got torch\.optim\.adamw\.AdamW$"):
        to_mixed(net, optimizer=prepare(torch.optim.AdamW(net.parameters())))


def test_metrics_follow_the_optimizer_that_fabric_made():
    plugin = MixedPrecision("16-mixed", scaler=lightning.overflowing())
    logger = mock.Mock()
    fabric, net = Fabric(accelerator="cpu", devices=1, plugins=[plugin], loggers=[logger]), network()
    model, optimizer = fabric.setup(net, AdamW(net.parameters(), max_norm=MAX_NORM))
    metrics = Metrics(optimizer, plugin.scaler)
    for seed in range(2):
        inputs, targets = batch(seed)
        optimizer.zero_grad()
        fabric.backward((model(inputs).float() - targets).square().mean())
        optimizer.step()
        fabric.log_dict(metrics.read(), step=seed)
    logged = [call.kwargs["metrics"] for call in logger.log_metrics.call_args_list]
    assert [it["loss_scale"] for it in logged] == [2.0**60, 2.0**10]
    assert [it["skipped_steps"] for it in logged] == [1, 1]
    assert optimizer.optimizer.state[net[0].weight]["step"] == 1
    assert logged[1]["grad_norm"] == optimizer.optimizer.grad_norm
