"""A model is converted to another dtype amid its training: steps go on from its weights, its state saves and loads."""

import copy
import itertools
import pickle

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

from mpkernels import checkpoint
from mpkernels.amp import to_full, to_mixed
from mpkernels.optim import AdamW, Masters
from mpkernels.optim.masters import true_weight
from tests.hard_grads import same_bits
from tests.networks import B16, F16, network, train
from tests.optim.optimizers import all_same_bits, true_weights
from tests.processes import alone, needs_gloo

DTYPES = [B16, F16, torch.float32, torch.float64]
CONVERSIONS = [(before, after) for before in DTYPES for after in DTYPES if before != after]
OPTIONS = [
    {"master": master, "state_dtype": state_dtype, "amsgrad": state_dtype == B16}
    for master in ("split", "fp32")
    for state_dtype in (torch.float32, B16, torch.int8)
]
MASTERS = {"remainder", "master"}


def converted(before, after, **options):
    """Return a model and its optimizer after three steps in one dtype, with the model then converted to another."""
    model = network(before)
    optimizer = AdamW(model.parameters(), lr=1e-2, guard=False, **options)
    train(model, optimizer, 3)
    return model.to(after), optimizer


def as_it_was(model, optimizer):
    return model, optimizer


def deep_copy(model, optimizer):
    return copy.deepcopy((model, optimizer))


def pickled(model, optimizer):
    return pickle.loads(pickle.dumps((model, optimizer)))


def loaded(model, optimizer):
    other = copy.deepcopy(model)
    again = AdamW(other.parameters(), **{key: optimizer.param_groups[0][key] for key in ("lr", *OPTIONS[0])})
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return other, again


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("before", "after"), CONVERSIONS, ids=str)
def test_a_checkpoint_of_a_converted_model_loads_into_a_model_of_its_new_dtype(tmp_path, before, after, options):
    model, optimizer = converted(before, after, **options)
    other = network(after, seed=7)
    again = AdamW(other.parameters(), guard=False, **options)
    checkpoint.save(tmp_path / "last.pt", model=model, optimizer=optimizer)
    for state in torch.load(tmp_path / "last.pt", weights_only=True)["optimizer"]["state"].values():
        assert not MASTERS & state.keys() or after in (B16, F16)
        assert state.get("remainder", state["exp_avg"]).dtype in (after, state["exp_avg"].dtype)
    checkpoint.load(tmp_path / "last.pt", model=other, optimizer=again)
    train(model, optimizer, 2)
    train(other, again, 2)
    assert all_same_bits(model.parameters(), other.parameters())
    assert all_same_bits(true_weights(model, optimizer), true_weights(other, again))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("before", [B16, F16], ids=str)
@pytest.mark.parametrize("after", [torch.float32, torch.float64], ids=str)
def test_torchs_adamw_loads_the_state_of_a_converted_model(before, after, options):
    model, optimizer = converted(before, after, **options)
    other = copy.deepcopy(model)
    torchs = torch.optim.AdamW(other.parameters(), lr=1e-2, foreach=False)
    torchs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert not any(MASTERS & state.keys() for state in torchs.state.values())
    if options["state_dtype"] == torch.float32:
        train(model, optimizer, 1)
        train(other, torchs, 1)
        torch.testing.assert_close(list(model.parameters()), list(other.parameters()), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:AdamW. .* parameters are not the weights that the loaded masters")
@pytest.mark.parametrize("duplicate", [as_it_was, deep_copy, pickled, loaded], ids=lambda it: it.__name__)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("before", "after"), CONVERSIONS, ids=str)
def test_the_next_step_starts_from_the_converted_weights(before, after, options, duplicate):
    """The state may have been copied, or loaded and not stepped, before the model is converted."""
    model = network(before)
    optimizer = AdamW(model.parameters(), lr=1e-2, guard=False, **options)
    train(model, optimizer, 3)
    model, optimizer = duplicate(model, optimizer)
    model.to(after)
    wanted = [param.detach().clone() for param in model.parameters()]
    optimizer.param_groups[0] |= {"lr": 0.0, "weight_decay": 0.0}
    train(model, optimizer, 1)
    for param, weight, found in zip(model.parameters(), wanted, true_weights(model, optimizer), strict=True):
        assert same_bits(param, weight)
        if options["master"] == "split":  # an fp32 master is kept where it rounds to the weight
            assert torch.equal(found.double(), weight.double()), param.shape
        assert same_bits(found.to(after), weight)


@pytest.mark.parametrize("before", [B16, F16], ids=str)
@pytest.mark.parametrize("away", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("master", ["split", "fp32"])
def test_a_model_that_is_widened_and_converted_back_keeps_its_masters(before, away, master):
    """Users may evaluate in a wider dtype, and save the state meanwhile: the training goes on unchanged."""
    model = network(before)
    optimizer = AdamW(model.parameters(), lr=1e-2, master=master)
    train(model, optimizer, 3)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    model.to(away)
    optimizer.state_dict()
    model.to(before)
    train(model, optimizer, 2)
    train(twin, twin_optimizer, 2)
    assert all(map(same_bits, model.parameters(), twin.parameters()))
    assert all(map(same_bits, true_weights(model, optimizer), true_weights(twin, twin_optimizer)))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("before", "after"), CONVERSIONS, ids=str)
def test_released_steps_of_a_converted_model_equal_plain_steps(before, after, options):
    model, optimizer = converted(before, after, **options)
    other, again = copy.deepcopy((model, optimizer))
    optimizer.release_grads()
    train(model, optimizer, 2)
    train(other, again, 2)
    assert all_same_bits(model.parameters(), other.parameters())


def test_a_converted_model_becomes_mixed_and_full_again():
    for scheme in ("split", "fp32"):
        model, optimizer = converted(B16, torch.float32, master="split")
        optimizer.param_groups[0]["master"] = scheme
        wanted = [param.detach().clone() + 2**-20 for param in model.parameters()]
        for param, weight in zip(model.parameters(), wanted, strict=True):
            param.data.copy_(weight)
        to_mixed(model, optimizer=optimizer)
        to_full(model, optimizer)
        assert all(map(same_bits, model.parameters(), wanted))


@needs_gloo
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_sharded_state_loads_into_a_converted_model(options):
    with alone():
        for before, after in CONVERSIONS:
            model, other = fully_shard(network(before)), fully_shard(network(after, seed=7))
            optimizer = AdamW(model.parameters(), lr=1e-2, guard=False, **options)
            again = AdamW(other.parameters(), lr=1e-2, guard=False, **options)
            train(model, optimizer, 2)
            model.to(after)
            saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
            assert after in (B16, F16) or not any(MASTERS & state.keys() for state in saved["state"].values())
            other.load_state_dict(model.state_dict())
            set_optimizer_state_dict(other, again, saved)
            for trained, its_optimizer in ((model, optimizer), (other, again)):
                for param in trained.parameters():  # FSDP2 itself trains no model that was converted
                    param.grad = torch.ones_like(param)
                its_optimizer.step()
            for param, twin in zip(model.parameters(), other.parameters(), strict=True):
                assert same_bits(param.full_tensor(), twin.full_tensor())


CONVERT = {
    "bf16": lambda model, _: model.to(B16),
    "fp16": lambda model, _: model.to(F16),
    "mixed": lambda model, optimizer: to_mixed(model, optimizer=optimizer),
}
CASES = [(*it, how) for it in itertools.product(("split", "fp32"), repeat=2) for how in ("bf16", "mixed")]
CASES += [("Masters", "Masters", how) for how in ("bf16", "fp16")]


def made(scheme, params):
    """Return our AdamW with masters of this scheme, or Masters around torch's."""
    return Masters(torch.optim.AdamW(params, 1e-2)) if scheme == "Masters" else AdamW(params, 1e-2, master=scheme)


@pytest.mark.parametrize(("saves", "loads", "how"), CASES)
def test_masters_that_were_loaded_into_an_fp32_model_are_used_once_it_is_converted(saves, loads, how):
    model, other, convert = network(), network(seed=7), CONVERT[how]
    optimizer = made(saves, model.parameters())
    convert(model, optimizer)
    train(model, optimizer, 3)
    again = made(loads, other.parameters())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other.load_state_dict(model.state_dict())
    convert(other, again)
    wanted = true_weights(model, optimizer)
    again.param_groups[0] |= {"lr": 0.0, "weight_decay": 0.0}
    train(other, again, 1)
    assert all_same_bits(true_weights(other, again), wanted)


@pytest.mark.parametrize("scheme", ["split", "fp32", "Masters"])
def test_a_step_in_fp32_drops_the_loaded_masters(scheme):
    """The weights that the step has moved win over the masters, also after a later conversion."""
    model = network(B16)
    train(model, optimizer := made(scheme, model.parameters()), 3)
    other = copy.deepcopy(model).float()
    again = made(scheme, other.parameters())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all(true_weight(param, again.state[param]).data_ptr() == param.data_ptr() for param in other.parameters())
    assert not any(MASTERS & state.keys() for state in again.state_dict()["state"].values())
    train(other, again, 1)
    assert not any(MASTERS & state.keys() for state in again.state.values())


@pytest.mark.parametrize("which", [slice(None), slice(0, 1), slice(-1, None)], ids=["all", "first", "last"])
@pytest.mark.parametrize("master", ["split", "fp32"])
def test_parameters_that_turn_16_bit_get_masters_and_the_guard(target, master, which):
    """They step as if they had turned 16-bit before any table was made."""
    stepped, anew = network(device=target.device), network(device=target.device)
    optimizers = [AdamW(model.parameters(), lr=1e-2, master=master) for model in (stepped, anew)]
    for model, optimizer in zip((stepped, anew), optimizers, strict=True):
        train(model, optimizer, 1)
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
    assert all_same_bits(stepped.parameters(), anew.parameters())
