"""Mixtures of experts of transformers: fuse says why it leaves stacked experts, and their masters train."""

import warnings
from functools import partial

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close

from mpkernels.amp import to_full, to_mixed
from mpkernels.nn import fuse
from mpkernels.optim import AdamW, Lion, split_params
from tests.distributed.sharding import part_of
from tests.hard_grads import same_bits
from tests.networks import B16
from tests.processes import in_processes, spawn

pytest.importorskip("transformers", reason="needs the extra integrations")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

    from tests.integrations.test_integration_fuse import LLAMA

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own
SIZES = LLAMA | {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "initializer_range": 0.2}
MODELS = {  # three experts, in two processes: one process holds a smaller part
    "Mixtral": SIZES | {"num_local_experts": 3},
    "Qwen2Moe": SIZES | {"num_experts": 3, "shared_expert_intermediate_size": 32},
    "GptOss": SIZES | {"num_local_experts": 3, "rope_scaling": None},
}


def mixture(name):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**MODELS[name])
    return getattr(transformers, f"{name}ForCausalLM")(config)


def trained(model, optimizer, steps=200):
    """Return the loss, on average over the last steps."""
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        first = torch.randint(64, (16, 1))
        text = (first + torch.arange(8) * (1 + first % 3)) % 64
        loss = model(input_ids=text, labels=text).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return sum(losses[-20:]) / 20


def experts_of(model):
    return {name: it for name, it in model.named_parameters() if it.ndim == 3}


def test_fuse_says_why_stacked_experts_are_left_and_fuses_the_shared_one():
    model = mixture("Qwen2Moe")
    report = fuse(model)
    experts = [it for it in report.left if it.module.endswith("mlp.experts")]
    assert len(experts) == 2
    assert {it.reason for it in experts} == {
        "it stacks the weights of several layers, such as experts, in one tensor, and mpkernels has no op for these"
    }
    assert {it.module for it in report.fused} >= {f"model.layers.{i}.mlp.shared_expert" for i in range(2)}
    assert {*experts_of(model).values()} <= {*split_params(model)[1]}


@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_experts_with_masters_learn_what_fp32_ones_learn(name):
    lr = 3e-4
    want = trained(model := mixture(name), torch.optim.AdamW(model.parameters(), lr=lr))
    without = trained(model := mixture(name).to(B16), torch.optim.AdamW(model.parameters(), lr=lr))
    model = to_mixed(mixture(name), B16, keep_fp32=["*.mlp.gate", "*.mlp.router"][name == "GptOss"])
    optimizer = AdamW(model.parameters(), lr=lr)
    assert {it.dtype for it in experts_of(model).values()} == {B16}
    assert abs(trained(model, optimizer) - want) < 0.05 * want
    assert without > 1.2 * want
    rounded = {name: it.detach().clone() for name, it in experts_of(model).items()}
    to_full(model, optimizer)
    for key, it in experts_of(model).items():
        assert it.dtype == torch.float32
        assert_close(it.to(B16), rounded[key], rtol=2**-7, atol=0)  # to_full may break a tie the other way
        assert not torch.equal(it, rounded[key].float())


def check_fsdp2(rank):
    """Both processes take the same batches, so that the grads, and all that follows, are those of one process."""
    warnings.simplefilter("ignore")
    for make in (AdamW, partial(Lion, master="fp32")):
        models = [mixture("Mixtral").to(B16) for _ in range(2)]
        for it in (*models[1].model.layers, models[1]):
            fully_shard(it)
        optimizers = [make(it.parameters(), lr=3e-4) for it in models]
        for model, optimizer in zip(models, optimizers, strict=True):
            trained(model, optimizer, 20)
        alone, sharded = map(experts_of, models)
        for name, it in alone.items():
            states = optimizers[0].state[it], optimizers[1].state[sharded[name]]
            assert same_bits(it.detach().chunk(2)[rank], part_of(sharded[name])), name
            for key in {"remainder", "master", "exp_avg"} & states[0].keys():
                assert same_bits(states[0][key].chunk(2)[rank], part_of(states[1][key])), (name, key)


@in_processes
def test_experts_in_two_processes_get_the_masters_of_one(tmp_path):
    spawn(check_fsdp2, tmp_path)
