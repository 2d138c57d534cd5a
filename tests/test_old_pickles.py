"""What was pickled and saved before the packages were made loads, and goes on with the same bits."""

import pickle
from pathlib import Path

import pytest
import torch

from mpkernels.amp import GradScaler, Policy
from mpkernels.nn import LinearAct
from mpkernels.optim import AdamW
from tests.cases import same_bits

WRITTEN = torch.load(Path(__file__).parent / "fixtures" / "before_the_rooms.pt", weights_only=True)
IDS = ["fp32", "bf16, split", "fp16, fp32 masters, schedule", "int8"]


def step(model, optimizer, scaler):
    for i, param in enumerate(model.parameters()):
        param.grad = torch.linspace(-1, 1, param.numel()).reshape(param.shape).mul(8 + i).to(param.dtype)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("run", WRITTEN["runs"], ids=IDS)
def test_a_pickle_goes_on(run):
    model, optimizer, scaler = pickle.loads(run["pickle"])
    step(model, optimizer, scaler)
    assert all(map(same_bits, model.parameters(), run["after"]))
    assert scaler.get_scale() == run["scale"]
    assert str(pickle.loads(run["report"])) == run["text"]


@pytest.mark.parametrize("run", WRITTEN["runs"], ids=IDS)
def test_a_checkpoint_goes_on(run):
    options = dict(run["options"])
    model = torch.nn.Sequential(LinearAct(6, 8, activation="relu"), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3))
    model.to(options.pop("dtype"))
    optimizer = AdamW(model.parameters(), max_norm=1.0, **options)
    is_scheduled = options["master"] == "fp32"
    scaler = GradScaler("cpu", scaling=[(0, 8.0), (100, 16.0)] if is_scheduled else "dynamic")
    for each, saved in zip((model, optimizer, scaler), pickle.loads(run["checkpoint"]), strict=True):
        each.load_state_dict(saved)
    step(model, optimizer, scaler)
    assert all(map(same_bits, model.parameters(), run["after"]))
    assert scaler.get_scale() == run["scale"]


def test_a_policy_and_a_mixed_model():
    assert pickle.loads(WRITTEN["policy"]) == Policy("bf16")
    assert all(map(same_bits, pickle.loads(WRITTEN["mixed"]).parameters(), WRITTEN["mixed_weights"]))
