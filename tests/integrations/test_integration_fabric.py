"""Lightning Fabric's loop with the precision plugin, against the real library."""

import warnings
from unittest import mock

import pytest
import torch
from torch.testing import assert_close

from mpkernels import Metrics
from mpkernels.amp import GradScaler, clip_grad_norm_, to_full, to_mixed
from mpkernels.optim import AdamW
from tests.networks import B16, F16, batch, network

pytest.importorskip("lightning", reason="needs the extra integrations")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.precision import MixedPrecision as FabricsPrecision

    from mpkernels.integrations.fabric import MixedPrecision

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own
MAX_NORM, LR, BATCHES = 0.1, 1e-2, 6
KINDS = {
    "ours": AdamW,
    "torch's": torch.optim.AdamW,
    "torch's fused": lambda params, lr: torch.optim.AdamW(params, lr, fused=True),
}
CLIPS = {"max_norm": torch.nn.utils.clip_grad_norm_, "clip_val": torch.nn.utils.clip_grad_value_}


def by_fabric(kind, plugin, **clip):
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    net = network()
    model, optimizer = fabric.setup(net, kind(net.parameters(), lr=LR))
    for seed in range(BATCHES):
        inputs, targets = batch(seed)
        optimizer.zero_grad()
        fabric.backward((model(inputs).float() - targets).square().mean())
        fabric.clip_gradients(model, optimizer, **clip, **({"error_if_nonfinite": False} if "max_norm" in clip else {}))
        optimizer.step()
    return net, optimizer


def by_hand(dtype, clip):
    model = network()
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=LR), GradScaler("cpu", enabled=dtype == F16)
    for seed in range(BATCHES):
        inputs, targets = batch(seed)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            outputs = model(inputs.to(dtype))  # as Fabric casts what goes in
        scaler.scale((outputs.float() - targets).square().mean()).backward()
        scaler.unscale_(optimizer)
        clip(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("precision", "dtype"), [("16-mixed", F16), ("bf16-mixed", B16)])
@pytest.mark.parametrize("clip", CLIPS)
def test_clipping_works(kind, precision, dtype, clip):
    plugin = MixedPrecision(precision, "cpu")
    net, _ = by_fabric(KINDS[kind], plugin, **{clip: MAX_NORM})
    assert_close(net.state_dict(), by_hand(dtype, CLIPS[clip]).state_dict(), rtol=0, atol=LR / 20)
    assert isinstance(plugin.scaler, GradScaler) == (dtype == F16)


def test_an_overflow_skips_the_step():
    plugin = MixedPrecision("16-mixed", scaler=GradScaler("cpu", init_scale=2.0**60, backoff_factor=2.0**-50))
    net, optimizer = by_fabric(AdamW, plugin, max_norm=MAX_NORM)
    assert plugin.scaler.skipped_steps == 1
    assert optimizer.optimizer.state[net[0].weight]["step"] == BATCHES - 1


def test_without_the_plugin_fabric_refuses_in_fp16_and_clips_in_bf16():
    with pytest.raises(NotImplementedError, match="not implemented for optimizers handling the unscaling"):
        by_fabric(AdamW, FabricsPrecision("16-mixed", "cpu"), max_norm=MAX_NORM)
    net, _ = by_fabric(AdamW, FabricsPrecision("bf16-mixed", "cpu"), max_norm=MAX_NORM)
    assert_close(net.state_dict(), by_hand(B16, clip_grad_norm_).state_dict(), rtol=0, atol=LR / 20)


def test_a_model_is_converted_and_converted_back_with_the_optimizer_that_fabric_made():
    fabric = Fabric(accelerator="cpu", devices=1)
    net = network()
    inner = AdamW(net.parameters(), lr=LR)
    optimizer = fabric.setup_optimizers(inner)
    (net(batch(0)[0]) - batch(0)[1]).square().mean().backward()
    optimizer.step()
    before = {name: it.clone() for name, it in net.state_dict().items()}
    to_mixed(net, optimizer=optimizer)
    assert net[0].weight.dtype == B16
    to_full(net, optimizer)
    assert_close(net.state_dict(), before, rtol=0, atol=0)
    assert inner._plans == []  # the inner optimizer, not its wrapper, has noticed that its parameters changed


def test_metrics_follow_the_optimizer_that_fabric_made():
    plugin = MixedPrecision("16-mixed", scaler=GradScaler("cpu", init_scale=2.0**60, backoff_factor=2.0**-50))
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
    assert logged[1]["grad_norm"] == optimizer.optimizer.grad_norm
