"""Users change weights, states and groups by hand between steps."""

import pytest
import torch

from mpkernels.ops.step.split import join
from mpkernels.optim import AdamW
from tests.hard_grads import same_bits
from tests.networks import B16, backward, network


@pytest.mark.parametrize("which", [slice(None), slice(0, 1), slice(-1, None)], ids=["all", "first", "last"])
@pytest.mark.parametrize("master", ["split", "fp32"])
def test_parameters_that_turn_16_bit_get_masters_and_the_guard(target, master, which):
    """They step as if they had turned 16-bit before any table was made."""
    stepped, anew = network(device=target.device), network(device=target.device)
    optimizers = [AdamW(model.parameters(), lr=1e-2, master=master) for model in (stepped, anew)]
    for model, optimizer in zip((stepped, anew), optimizers, strict=True):
        backward(model, 0)
        optimizer.step()
        for param in list(model.parameters())[which]:
            param.grad = None
            param.data = param.data.bfloat16()
        for seed, bad in ((1, 1.0), (2, float("nan"))):
            if model is anew:
                optimizer._start_afresh()
            generator = torch.Generator().manual_seed(seed)
            for param in model.parameters():
                param.grad = torch.randn(param.shape, generator=generator).to(param) * bad
            optimizer.step()
    key = {"split": "remainder", "fp32": "master"}[master]
    assert all(key in optimizers[0].state[param] for param in list(stepped.parameters())[which])
    assert optimizers[0].skipped_steps.item() == 1
    assert all(map(same_bits, stepped.parameters(), anew.parameters()))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64], ids=str)
def test_a_step_goes_on_from_a_count_that_is_set_by_hand(target, dtype):
    weight = torch.nn.Parameter(torch.ones(2, device=target.device))
    optimizer = AdamW([weight])
    for expected in (1, 6):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        assert optimizer.state[weight]["step"].item() == expected
        optimizer.state[weight]["step"] = torch.tensor(5, dtype=dtype, device=target.device)


def test_a_step_count_is_fp32_whatever_the_default():
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    weight.grad = torch.ones_like(weight)
    optimizer = AdamW([weight])
    torch.set_default_dtype(torch.float64)
    try:
        optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert optimizer.state[weight]["step"].dtype == torch.float32


def test_adamw_refuses_adams_weight_decay():
    with pytest.raises(ValueError, match="AdamW: a group must have decoupled_weight_decay=True, got False"):
        AdamW([{"params": [torch.nn.Parameter(torch.ones(2))], "decoupled_weight_decay": False}])


@pytest.mark.parametrize("through", ["itself", "data", "detach"])
@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("master", ["split", "fp32"])
def test_a_write_to_a_weight_reaches_its_master(target, master, released, through):
    """Nothing else in the master changes. A weight may lack a grad in the step after the write."""
    weights = [torch.nn.Parameter(torch.ones(3, dtype=B16, device=target.device)) for _ in range(2)]
    optimizer = AdamW(weights, lr=0.1, weight_decay=0, master=master, guard=False)
    if released:
        optimizer.release_grads()
    for lr, stepped in ((1e-3, weights), (0.0, weights[:1]), (0.0, weights)):
        optimizer.param_groups[0]["lr"] = lr
        sum(weight.sum() for weight in stepped).backward()
        optimizer.step()
        optimizer.zero_grad()
        if lr:
            before = weights[0].tolist()
            with torch.no_grad():
                for weight in weights:
                    {"itself": weight, "data": weight.data, "detach": weight.detach()}[through][1] = 5.0
    for weight in weights:
        state = optimizer.state[weight]
        kept = (state["master"] if master == "fp32" else join(weight.detach(), state["remainder"])).tolist()
        assert weight.tolist() == [before[0], 5.0, before[2]]
        assert kept[0] == kept[2] == pytest.approx(1 - 1e-3, abs=1e-6)  # which bf16 rounds to 1
        assert kept[1] == pytest.approx(5, rel=2**-9)
