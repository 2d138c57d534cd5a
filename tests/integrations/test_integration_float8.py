"""torchao's float8 linears: fuse leaves them, our optimizers train them, alone and under FSDP2's float8 all-gather.

``emulate=True`` computes the float8 products without a GPU's instructions for them."""

import warnings
from functools import partial

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

from mpkernels.nn import fuse
from mpkernels.optim import AdamW, Lion, Masters
from tests.distributed.sharding import part_of
from tests.hard_grads import same_bits
from tests.networks import B16
from tests.processes import in_processes, spawn

pytest.importorskip("torchao", reason="needs the extra integrations")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchao.float8 import (
        Float8LinearConfig,
        convert_to_float8_training,
        precompute_float8_dynamic_scale_for_fsdp,
    )

pytestmark = pytest.mark.filterwarnings("ignore")  # torchao's own
OPTIMIZERS = {
    "AdamW": partial(AdamW, lr=1e-2, max_norm=0.1),
    "AdamW, int8": partial(AdamW, lr=1e-2, max_norm=0.1, state_dtype=torch.int8),
    "AdamW, fp32 master": partial(AdamW, lr=1e-2, max_norm=0.1, master="fp32"),
    "Lion": partial(Lion, lr=1e-3, max_norm=0.1),
}


def float8(dtype, gathers=False, converts=lambda module, name: True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Linear(32, 64), nn.SiLU())
    config = Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=gathers)
    return convert_to_float8_training(model.to(dtype), config=config, module_filter_fn=converts)


def trained(model, optimizer, steps, first=0):
    losses = []
    for step in range(first, first + steps):
        torch.manual_seed(step)
        inputs = torch.randn(32, 32, dtype=model[0].weight.dtype)
        loss = (model(inputs).float() - torch.cat([inputs, inputs.roll(1, 1)], 1).relu()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        precompute_float8_dynamic_scale_for_fsdp(model)  # of weights that FSDP2 gathers in float8: there are none else
        losses.append(loss.item())
    return sum(losses[-10:]) / 10


def values_of(model, optimizer):
    """Return the weights and their states, without torchao's class around them. Lion's checkpoint has no step."""
    for param in model.parameters():
        for it in (param, *(value for key, value in optimizer.state[param].items() if key != "step")):
            part = part_of(it.detach())
            yield getattr(part, "_tensor", part)


def test_fuse_leaves_them_and_fuses_the_others():
    model = float8(B16, converts=lambda module, name: name == "0")
    report = fuse(model)
    assert [(it.stood_there, it.computed_by.split(",")[0]) for it in report.fused] == [("Linear, SiLU", "linear_act")]
    assert [it.reason for it in report.left] == ["Float8Linear is no plain torch.nn.Linear"]


def test_weights_with_masters_learn_what_fp32_ones_learn():
    losses = {}
    for name, dtype, make in (
        ("fp32", torch.float32, torch.optim.AdamW),
        ("masters", B16, AdamW),
        ("int8", B16, partial(AdamW, state_dtype=torch.int8)),
        ("none", B16, torch.optim.AdamW),
    ):
        model = float8(dtype)
        losses[name] = trained(model, make(model.parameters(), lr=2e-4), 300)
    assert max(losses["masters"], losses["int8"]) < 1.02 * losses["fp32"]
    assert losses["none"] > 1.1 * losses["fp32"]


@pytest.mark.parametrize("dtype", [torch.float32, B16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_that_are_gathered_in_float8_are_stepped_as_plain_ones(name, dtype):
    """Also from a checkpoint midway."""
    models = [float8(dtype, gathers) for gathers in (False, True)]
    assert type(models[1][0].weight).__name__ == "WeightWithDynamicFloat8CastTensor"
    plain, ours = (OPTIMIZERS[name](it.parameters()) for it in models)
    trained(models[0], plain, 6)
    trained(models[1], ours, 3)
    saved, ours = ours.state_dict(), OPTIMIZERS[name](models[1].parameters())
    ours.load_state_dict(saved)
    trained(models[1], ours, 3, first=3)
    assert all(map(same_bits, values_of(models[1], ours), values_of(models[0], plain)))


def test_masters_refuses_them_beside_16_bit_weights():
    with pytest.raises(TypeError, match=r"^Masters: params\[0\] must be a plain tensor, got a WeightWithDynamicFloat8"):
        Masters(torch.optim.AdamW(float8(B16, gathers=True).parameters()))


def sharded(name, gathers):
    model = float8(B16, gathers)
    for it in (model[0], model[2], model):
        fully_shard(it)
    optimizer = OPTIMIZERS[name](model.parameters())
    return trained(model, optimizer, 6, 1000 * distributed.get_rank()), model, optimizer


def check_fsdp2(rank):
    warnings.simplefilter("ignore")
    for name in OPTIMIZERS:
        (want, *plain), (got, *ours) = (sharded(name, gathers) for gathers in (False, True))
        assert type(ours[0][0].weight.to_local()).__name__ == "WeightWithDynamicFloat8CastTensor"
        assert got == want
        assert all(map(same_bits, values_of(*ours), values_of(*plain)))
    with pytest.raises(TypeError, match=r"^Masters: params\[0\] must be a plain tensor, got a WeightWithDynamicFloat8"):
        Masters(torch.optim.AdamW(ours[0].parameters()))


@in_processes
def test_two_processes_gather_in_float8_what_they_would_gather_in_16_bits(tmp_path):
    spawn(check_fsdp2, tmp_path)
