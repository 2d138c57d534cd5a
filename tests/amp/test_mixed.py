"""to_mixed converts a model and to_full converts it back: what stays fp32, what stays tied."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from mpkernels.amp import to_full, to_mixed
from mpkernels.ops.step.split import join
from mpkernels.optim import AdamW
from tests.amp.mixed_models import F32, TOKENS, Tied, train_a_step
from tests.networks import B16, F16, network

IMAGE, SEQUENCE = torch.linspace(-1, 1, 384).view(2, 3, 8, 8), torch.linspace(-1, 1, 160).view(2, 5, 16)
MODELS = {
    "third-party norm, tied": (Tied, TOKENS),
    "layer norm": (network, torch.ones(4, 20)),
    "batch, group, instance norm": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.GroupNorm(2, 8),
            nn.Conv2d(8, 4, 3),
            nn.InstanceNorm2d(4, affine=True),
        ),
        IMAGE,
    ),
    "rms norm": (lambda: nn.Sequential(nn.Linear(16, 8), nn.RMSNorm(8), nn.Linear(8, 8)), SEQUENCE),
    "transformer": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), SEQUENCE),
    "lstm": (lambda: nn.LSTM(16, 8), SEQUENCE),
}


def torch_runs(make, inputs, dtype):
    """Return whether torch can run the model: oneDNN lacks a (trainable) fp16 LSTM on some CPUs, but torch calls it."""
    try:
        with torch.autocast("cpu", dtype=dtype):
            make()(inputs)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("dtype", [B16, F16], ids=str)
@pytest.mark.parametrize("which", MODELS)
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # autocast's RMSNorm, torch's own words
def test_a_model_trains_evaluates_and_comes_back(which, dtype):
    make, inputs = MODELS[which]
    if not torch_runs(make, inputs, dtype):
        pytest.skip(f"torch's own autocast to {dtype} can't run it on this CPU")
    model = make()
    names = [name for name, _ in model.named_parameters()]
    assert to_mixed(model, dtype) is model
    assert type(model).__name__ == type(make()).__name__
    assert isinstance(model, type(make()))
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        train_a_step(model, inputs, optimizer)
    with torch.autocast("cpu", dtype=dtype):
        train_a_step(model, inputs, optimizer)
    with torch.no_grad():
        model.eval()(inputs)
    model.train()
    masters = {
        name: join(param.detach(), optimizer.state[param]["remainder"])
        if param.dtype == dtype
        else param.detach().clone()
        for name, param in model.named_parameters()
    }
    assert to_full(model, optimizer) is model
    assert type(model) is type(make())
    assert [name for name, _ in model.named_parameters()] == names
    assert_close(dict(model.named_parameters()), {k: nn.Parameter(v) for k, v in masters.items()}, rtol=0, atol=0)
    assert all("remainder" not in state for state in optimizer.state.values())
    train_a_step(model, inputs, optimizer)


def dtypes(model):
    return {name: tensor.dtype for name, tensor in model.state_dict().items()}


def test_norms_buffers_and_named_layers_stay_fp32():
    norm_and_buffer = {"norm.weight": F32, "table": F32}
    narrow = dict.fromkeys(("up.weight", "up.bias", "embed.weight", "head.weight"), B16)
    assert dtypes(to_mixed(Tied())) == narrow | norm_and_buffer
    named = to_mixed(Tied(), keep_fp32=["head", "up.b*"])
    assert dtypes(named) == narrow | norm_and_buffer | {"head.weight": F32, "embed.weight": F32, "up.bias": F32}
    assert named.head.weight is named.embed.weight
    stats = {"1.running_mean": F32, "1.running_var": F32, "1.num_batches_tracked": torch.int64}
    norm = to_mixed(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.LayerNorm((3, 2))))
    assert dtypes(norm) == dict.fromkeys(("0.weight", "0.bias"), B16) | stats | dict.fromkeys(
        ("1.weight", "1.bias", "2.weight", "2.bias"), F32
    )
    assert to_mixed(nn.Sequential(nn.LayerNorm(4)).bfloat16())[0].weight.dtype == F32  # it was already in 16 bits


def test_tied_weights_stay_tied_and_grads_are_converted_too():
    model = Tied()
    model(TOKENS).sum().backward()
    weight, grad = model.head.weight, model.head.weight.grad
    to_mixed(model)
    assert model.embed.weight is model.head.weight is weight
    assert_close(weight.grad, grad.bfloat16(), rtol=0, atol=0)


def test_keep_fp32_takes_any_name_of_a_tied_weight():
    for name in ("0", "1"):
        twice = nn.Linear(2, 2)
        assert to_mixed(nn.Sequential(twice, twice), keep_fp32=name)[0].weight.dtype == F32
    for name in ("head.weight", "embed.weight"):
        assert to_mixed(Tied(), keep_fp32=name).embed.weight.dtype == F32


def test_a_model_on_the_meta_device_is_converted():
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    assert to_mixed(model).weight.dtype == B16


def test_a_weight_halfway_rounds_to_even_beside_an_fp32_master():
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, 1 + 2.0**-8)
    to_mixed(layer, optimizer=AdamW(layer.parameters(), master="fp32"))
    assert layer.weight.item() == 1
