"""Policies: the dtypes, autocast and scaler of each name, and which policy is best on which device."""

import warnings

import pytest
import torch

from mpkernels.amp import GradScaler, Policy, global_policy, set_global_policy, to_full
from mpkernels.optim import AdamW
from tests.networks import B16, F16, network, train

F32 = torch.float32


@pytest.mark.parametrize(
    ("name", "dtype", "scales"), [("mixed_float16", F16, True), ("mixed_bfloat16", B16, False), ("float32", F32, False)]
)
def test_a_policy_goes_with_autocast_scaler_and_weights(name, dtype, scales):
    policy = Policy(name)
    model = policy.convert(network(), keep_fp32=["3"])
    scaler = policy.scaler("cpu", init_scale=2.0**4)
    assert isinstance(scaler, GradScaler)
    assert (policy.compute_dtype, scaler.is_enabled()) == (dtype, scales)
    assert [model[0].weight.dtype, model[2].weight.dtype, model[3].weight.dtype] == [dtype, F32, F32]
    optimizer = AdamW(model.parameters())
    before = model[3].weight.detach().clone()
    with policy.autocast("cpu"):
        out = model(torch.ones(4, 20))
    assert out.dtype == dtype
    scaler.scale(out.float().square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not model[3].weight.equal(before)
    assert to_full(model, optimizer) is model  # also where the policy has converted nothing
    assert {param.dtype for param in model.parameters()} == {F32}


@pytest.mark.parametrize(
    ("short", "name"), [("bf16", "mixed_bfloat16"), ("fp16", "mixed_float16"), ("fp32", "float32")]
)
def test_short_names_mean_the_same_policies(short, name):
    assert Policy(short) == Policy(name)
    assert (Policy(short).name, repr(Policy(short))) == (name, f"Policy(name='{name}')")
    try:
        set_global_policy(short)
        assert global_policy().name == name
    finally:
        set_global_policy("float32")


def test_the_global_policy_can_be_set_by_name_or_policy():
    assert global_policy() == Policy("float32")
    try:
        set_global_policy("mixed_bfloat16")
        assert global_policy() == Policy("mixed_bfloat16")
        set_global_policy(Policy("mixed_float16"))
        assert global_policy().name == "mixed_float16"
    finally:
        set_global_policy("float32")
    with pytest.raises(ValueError, match=r"name must be one of 'mixed_float16', .*, got 'mixed_fp16'"):
        set_global_policy("mixed_fp16")
    with pytest.raises(TypeError, match="policy must be a Policy or the name of one, got None"):
        set_global_policy(None)
    assert global_policy() == Policy("float32")


@pytest.mark.parametrize("name", ["mixed_float16", "float32"])
@pytest.mark.parametrize("device", [torch.device("cpu"), "cpu:0", "cpu"])
def test_a_device_may_be_given_in_each_of_torchs_ways(name, device):
    with Policy(name).autocast(device):
        assert torch.is_autocast_enabled("cpu") == (name == "mixed_float16")
    scaler = Policy(name).scaler(device)
    assert scaler.is_enabled() == (name == "mixed_float16")
    scaler.scale(torch.ones(()))


@pytest.mark.parametrize(
    ("device", "amx", "avx512", "arm", "capability", "best"),
    [
        ("cpu", True, False, {}, None, "mixed_bfloat16"),
        ("cpu", False, True, {}, None, "mixed_bfloat16"),
        ("cpu", False, False, {"bf16": True}, None, "mixed_bfloat16"),
        ("cpu", False, False, {"avx2": True}, None, "float32"),
        ("cuda", False, False, {}, (6, 1), "float32"),
        ("cuda", False, False, {}, (7, 5), "mixed_float16"),
        ("cuda:0", False, False, {}, (8, 0), "mixed_bfloat16"),
        ("mps", False, False, {}, None, "mixed_float16"),
        ("xpu", False, False, {}, None, "mixed_bfloat16"),
        ("meta", True, True, {}, None, "float32"),
    ],
)
def test_the_best_policy_for_a_machine(monkeypatch, device, amx, avx512, arm, capability, best):
    monkeypatch.setattr("mpkernels.amp.policy.has_amx", lambda: amx)
    monkeypatch.setattr("mpkernels.amp.policy.has_avx512_bf16", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: arm, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert Policy.best(device) == Policy(best)


def test_the_best_policy_for_this_machine_trains():
    policy = Policy.best()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = policy.convert(network())
    train(model, AdamW(model.parameters()), 1)
