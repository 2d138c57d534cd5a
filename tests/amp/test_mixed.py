"""to_mixed and to_full."""

import copy
import inspect
import io
import pickle
from types import MethodType

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from mpkernels.amp import to_full, to_mixed
from mpkernels.ops.adamw.split import join
from mpkernels.optim import AdamW
from tests.networks import B16, F16, network, one_thread, train

__all__ = ["one_thread"]  # a fixture that each test uses

F32 = torch.float32


class LlamaRMSNorm(nn.Module):
    """As libraries write it: not torch's class, and its output takes the weight's dtype."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * wide.square().mean(-1, keepdim=True).add(1e-6).rsqrt()).to(x.dtype)


class NormedLinear(nn.Linear):
    """No norm for all its name: the weight is a matrix."""

    def forward(self, x):
        return nn.functional.linear(x, nn.functional.normalize(self.weight, dim=1), self.bias)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, 8), LlamaRMSNorm(8)
        self.up, self.head = NormedLinear(8, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.ones(8))

    def forward(self, tokens, scale=1.0):
        return self.head(self.up(self.norm(self.embed(tokens) * self.table))) * scale


TOKENS = torch.arange(10).view(2, 5)
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
    """oneDNN has no fp16 LSTM for some CPUs, and torch asks for it all the same."""
    try:
        with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
            make()(inputs)
    except RuntimeError:
        return False
    return True


def a_step(model, inputs, optimizer):
    out = model(inputs)
    (out[0] if isinstance(out, tuple) else out).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


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
        a_step(model, inputs, optimizer)
    with torch.autocast("cpu", dtype=dtype):
        a_step(model, inputs, optimizer)
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
    a_step(model, inputs, optimizer)


def dtypes(model):
    return {name: tensor.dtype for name, tensor in model.state_dict().items()}


def test_what_stays_fp32():
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
    assert to_mixed(nn.Sequential(nn.LayerNorm(4)).bfloat16())[0].weight.dtype == F32  # one that came in 16 bits


def test_tied_weights_stay_one_and_grads_come_along():
    model = Tied()
    model(TOKENS).sum().backward()
    weight, grad = model.head.weight, model.head.weight.grad
    to_mixed(model)
    assert model.embed.weight is model.head.weight is weight
    assert_close(weight.grad, grad.bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("master", ["split", "fp32"])
def test_the_optimizer_goes_on_in_fp32(master):
    """Three steps in 16 bits, then three in fp32: those are torch's, from the same weights and moments."""
    model = to_mixed(network())
    ours = AdamW(model.parameters(), lr=1e-3, master=master)
    train(model, ours, 3)
    state = ours.state[model[0].weight]
    weight = state["master"].clone() if master == "fp32" else join(model[0].weight.detach(), state["remainder"])
    to_full(model, ours)
    assert torch.equal(model[0].weight, weight)
    assert not torch.equal(weight, weight.bfloat16().float())
    twin = copy.deepcopy(model)
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-3)
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    train(model, ours, 3)
    train(twin, theirs, 3)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close(a, b, rtol=1e-6, atol=1e-6)
    to_mixed(model)  # and back again: masters grow anew
    train(model, AdamW(model.parameters()), 1)


@pytest.mark.parametrize("master", ["split", "fp32"])
@pytest.mark.parametrize("steps", [0, 2])
def test_an_optimizer_that_is_there_already_gets_the_weights_as_they_were(master, steps):
    model, twin = network(), network()
    optimizers = [AdamW(it.parameters(), lr=1e-3, master=master) for it in (model, twin)]
    for it, optimizer in zip((model, twin), optimizers, strict=True):
        if steps:
            train(it, optimizer, steps)
    to_mixed(model, optimizer=optimizers[0])
    assert model[0].weight.dtype == B16
    to_full(model, optimizers[0])
    assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=0)
    to_mixed(model, optimizer=optimizers[0])
    for seed in range(3):  # no step is lost in rounding
        for of_model, of_twin in zip(model.parameters(), twin.parameters(), strict=True):
            of_twin.grad = torch.randn(of_twin.shape, generator=torch.Generator().manual_seed(seed)).bfloat16().float()
            of_model.grad = of_twin.grad.to(of_model.dtype)
        for optimizer in optimizers:
            optimizer.step()
    to_full(model, optimizers[0])
    assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=0)
    with pytest.raises(TypeError, match=r"optimizer must be mpkernels.optim.AdamW, .* got torch.optim.sgd.SGD"):
        to_mixed(twin, optimizer=torch.optim.SGD(twin.parameters()))
    assert twin[0].weight.dtype == F32


def test_before_a_step_and_frozen_the_weight_is_its_own_master():
    model = to_mixed(network())
    model[3].requires_grad_(False)
    rounded = [param.detach().float() for param in model.parameters()]
    to_full(model, AdamW([*model[0].parameters(), *model[2].parameters()]))
    assert_close([param.detach() for param in model.parameters()], rounded, rtol=0, atol=0)


def test_checkpoints_go_on_bit_for_bit():
    model = to_mixed(network())
    optimizer = AdamW(model.parameters())
    train(model, optimizer, 2)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = to_mixed(network(seed=2))
    other.load_state_dict(saved["model"])
    again = AdamW(other.parameters())
    again.load_state_dict(saved["optimizer"])
    train(model, optimizer, 2)
    train(other, again, 2)
    to_full(model, optimizer)
    to_full(other, again)
    assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_copies_are_mixed_too(copied):
    model = to_mixed(Tied())
    twin = copied(model)
    assert type(twin) is type(model)
    assert twin.head.weight is twin.embed.weight is not model.head.weight
    assert_close(twin(TOKENS), model(TOKENS), rtol=0, atol=0)


def test_forward_keeps_its_signature():
    assert inspect.signature(to_mixed(Tied()).forward) == inspect.signature(Tied().forward)
    assert to_mixed(Tied(), keep_fp32="*")(TOKENS, scale=2.0).dtype == B16


def test_a_forward_that_is_set_later_runs_under_autocast_too():
    inputs, model = torch.ones(4, 20), to_mixed(network())
    wanted = -model(inputs)
    model.forward = MethodType(lambda self, x: -self[3](self[2](self[1](self[0](x)))), model)
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for each in (model, twin, compiled):
        assert_close(each(inputs), wanted, rtol=0, atol=0)
        assert each(inputs).dtype == B16
    with torch.no_grad():
        twin[3].weight.zero_()
        twin[3].bias.fill_(1)
    assert twin(inputs).tolist() == [[-1.0] * 5] * 4
    assert_close(model(inputs), wanted, rtol=0, atol=0)
    own = model.forward.__wrapped__
    to_full(model, AdamW(model.parameters()))
    assert model.forward is own
    assert model(inputs).dtype == F32


def test_compiled_it_computes_the_same():
    model = to_mixed(network())
    eager = model(torch.ones(4, 20))
    assert eager.dtype == B16
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(compiled(torch.ones(4, 20)), eager, rtol=0, atol=0)
    a_step(compiled, torch.ones(4, 20), AdamW(model.parameters()))


def test_ours_wins_over_an_autocast_around_it():
    model = to_mixed(network())
    with torch.autocast("cpu", dtype=F16):
        assert model(torch.ones(4, 20)).dtype == B16
        assert network()(torch.ones(4, 20)).dtype == F16


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.both = nn.Bilinear(8, 8, 4)

    def forward(self, x):
        return self.both(x, x)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 4)),
        lambda: nn.utils.spectral_norm(nn.Linear(8, 4)),
        Pair,
    ],
    ids=["spectral_norm", "spectral_norm's hook", "Bilinear"],
)
def test_what_autocast_has_no_rule_for_stays_fp32(make, training):
    x = torch.randn(5, 8)
    plain = nn.Sequential(make(), nn.Linear(4, 2)).train(training)
    with torch.no_grad():  # as the second weight is rounded to
        plain[1].weight.copy_(plain[1].weight.to(B16))
        plain[1].bias.copy_(plain[1].bias.to(B16))
    mixed = to_mixed(copy.deepcopy(plain))
    with torch.autocast("cpu", B16):
        want = plain(x)
    assert_close(mixed(x), want, rtol=0, atol=0)
    assert mixed[1].weight.dtype == B16
    mixed(x).sum().backward()
