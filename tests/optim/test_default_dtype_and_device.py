"""Narrow ledges of AdamW that a careless edit falls off. Each test was written for a planted bug that the others let
pass."""

import contextlib
import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch

from mpkernels.ops.step.split import join
from mpkernels.optim import AdamW
from mpkernels.optim.readback import Readback
from tests.cases import same_bits
from tests.networks import B16, backward, network, one_thread, train

__all__ = ["one_thread"]  # a fixture that each test uses

I8 = torch.int8


def test_copies_know_all_that_the_optimizer_knows():
    model = network(B16)
    train(model, optimizer := AdamW(model.parameters(), master="fp32", guard=True, state_dtype=B16), 1)
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        for key in ("master", "state_dtype", "max_norm", "guard", "grad_norm", "skipped_steps"):
            assert getattr(twin, key) == getattr(optimizer, key)


@pytest.mark.parametrize("amsgrad", [False, True])
def test_8_bit_checkpoints_resume_to_the_bit_and_torch_can_load_them(amsgrad):
    options = {"lr": 1e-2, "state_dtype": I8, "amsgrad": amsgrad}
    model = network()
    train(model, optimizer := AdamW(model.parameters(), **options), 5)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    for state in saved["state"].values():
        assert state.keys() == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"} - {
            "" if amsgrad else "max_exp_avg_sq"
        }
        assert {value.dtype for value in state.values()} == {torch.float32}
    resumed, torchs = copy.deepcopy(model), copy.deepcopy(model)
    other = AdamW(resumed.parameters(), **options)
    other.load_state_dict(copy.deepcopy(saved))
    theirs = torch.optim.AdamW(torchs.parameters(), lr=1e-2, amsgrad=amsgrad, foreach=False)
    theirs.load_state_dict(saved)
    for each in ((model, optimizer), (resumed, other), (torchs, theirs)):
        train(*each, 1, first=5)
    assert all(map(same_bits, model.parameters(), resumed.parameters()))
    torch.testing.assert_close(list(torchs.parameters()), list(model.parameters()))
    train(model, optimizer, 4, first=6)
    train(resumed, other, 4, first=6)
    assert all(map(same_bits, model.parameters(), resumed.parameters()))


def test_8_bit_checkpoints_in_another_layout():
    """Codes share their scales in the order of the parameter that they are loaded for."""
    values = torch.randn(4, 6, 5, 5, generator=torch.Generator().manual_seed(0))
    plain, last = (
        torch.nn.Parameter(values.to(memory_format=it)) for it in (torch.contiguous_format, torch.channels_last)
    )
    optimizers = [AdamW([param], state_dtype=I8) for param in (plain, last)]
    plain.grad = values * values
    optimizers[0].step()
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    got, want = (optimizer.state_dict()["state"][0]["exp_avg"] for optimizer in reversed(optimizers))
    assert got.stride() == last.stride()
    torch.testing.assert_close(got, want, rtol=0, atol=want.abs().max().item() / 100)


def test_what_a_checkpoint_has_beside_is_kept():
    model = network()
    train(model, optimizer := AdamW(model.parameters()), 1)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["note"] = torch.ones(2)
    optimizer.load_state_dict(saved)
    assert optimizer.state[model[0].weight]["note"].tolist() == [1.0, 1.0]


def test_a_tie_that_fp32_masters_have_rounded_to_even_keeps_its_master():
    """Split masters round it away from zero: the weight follows."""
    param = torch.nn.Parameter(torch.full((4,), 1.0, dtype=B16))
    param.grad = torch.zeros_like(param)
    (source := AdamW([param], master="fp32")).step()
    saved = copy.deepcopy(source.state_dict())
    saved["state"][0]["master"].fill_(1.0 + 2**-8)
    optimizer = AdamW([param])
    optimizer.load_state_dict(saved)
    optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    optimizer.step()
    assert param.tolist() == [1.0 + 2**-7] * 4
    assert join(param.detach(), optimizer.state[param]["remainder"]).tolist() == [1.0 + 2**-8] * 4


def test_skipped_steps_add_up():
    model = network(B16)
    optimizer = AdamW(model.parameters())
    for count in (1, 2, 3):
        backward(model, count)
        model[0].weight.grad[0, 0] = float("nan")
        optimizer.step()
        assert optimizer.skipped_steps.item() == count


class Event:
    """Has no synchronize."""

    def __init__(self):
        self.has_passed = False

    def query(self):
        return self.has_passed


def test_what_the_device_has_not_said_yet_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)  # which a CPU build can't say
    late, events = Readback(), [Event() for _ in range(3)]
    late._on_its_way.extend(zip("abc", events, strict=True))
    assert late.read() is None
    events[0].has_passed = events[1].has_passed = True
    assert [late.read(), late.read()] == ["b", "b"]
    events[2].has_passed = True
    assert late.read() == "c"


@pytest.mark.parametrize("dtype", [B16, torch.float64], ids=str)
def test_another_default_dtype(target, dtype):
    """Nothing of ours is as wide as the default."""
    results = []
    for default in (torch.float32, dtype):
        models = [network(it, target.device) for it in (torch.float32, B16)]
        try:
            torch.set_default_dtype(default)
            for state_dtype in (torch.float32, I8):
                params = [param for model in models for param in model.parameters()]
                optimizer = AdamW(params, lr=1e-2, max_norm=1.0, state_dtype=state_dtype)
                generator = torch.Generator().manual_seed(0)
                for _ in range(2):
                    for param in params:
                        param.grad = torch.randn(param.shape, generator=generator, dtype=torch.float32).to(param)
                    optimizer.step()
            results.append((params, optimizer.grad_norm, optimizer.step_was_skipped, optimizer.skipped_steps))
        finally:
            torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, {"state_dtype": I8}, {"lr": torch.tensor(1e-2), "max_norm": 1.0}])
def test_the_default_device_is_none_of_its_business(target, options):
    ours, plain = network(B16, target.device), network(B16, target.device)
    for model in (ours, plain):
        optimizer = AdamW(model.parameters(), **options)
        for seed in range(2):
            backward(model, seed)
            with torch.device("meta") if model is ours else contextlib.nullcontext():
                optimizer.step()
    assert all(map(same_bits, ours.parameters(), plain.parameters()))


def test_a_number_on_the_host_goes_by_value_to_another_device():
    """To copy it there, the host would wait."""
    model = network()
    backward(model, 0)
    optimizer = AdamW(model.parameters(), lr=torch.tensor(0.5), betas=(0.75, 0.875))
    optimizer.step()
    [plan] = optimizer._plans
    *_, by_place = plan._hyperparameters()
    assert [it.numel() for it in by_place] == [1, 0, 0]
    plan.device = torch.device("cuda")
    lr, beta1, beta2, *_, by_place = plan._hyperparameters()
    assert (lr, beta1, beta2, by_place) == ([0.5], [0.75], [0.875], [])


FAKE = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from mpkernels.optim import AdamW
with FakeTensorMode():
    for dtype in (torch.float32, torch.bfloat16):
        model = torch.nn.Linear(3, 4, dtype=dtype)
        optimizer = AdamW(model.parameters(), max_norm=1.0)
        for _ in range(2):
            model(torch.ones(2, 3, dtype=dtype)).sum().backward()
            optimizer.step()
    del optimizer
    print(model.weight.shape)
"""


def test_steps_of_tensors_without_memory():
    """Whoever estimates what a training takes steps fakes. In a process of its own, which a bad free would end."""
    done = subprocess.run([sys.executable, "-c", FAKE], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "torch.Size([4, 3])\n"), done.stderr


def stepped(**options):
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = AdamW([weight], **options)
    optimizer.step()
    return weight, optimizer


def test_a_learning_rate_in_16_bits():
    weight, _ = stepped(lr=torch.tensor(0.5, dtype=B16), weight_decay=0.0)
    torch.testing.assert_close(weight.detach(), torch.full((3,), 0.5))


def test_a_parameter_without_a_state_is_not_saved():
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = AdamW(weights)
    assert optimizer.state_dict()["state"] == {}
    weights[1].grad = torch.ones(3)
    optimizer.step()
    assert set(optimizer.state_dict()["state"]) == {1}


def test_a_load_hook_of_the_user_has_the_last_word():
    weight, optimizer = stepped()

    def replace(optimizer):
        optimizer.state[weight]["exp_avg"] = torch.full((3,), 0.5)

    optimizer.register_load_state_dict_post_hook(replace)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state[weight]["exp_avg"].tolist() == [0.5] * 3


def test_a_largest_that_is_not_used_now_is_kept_as_it_is():
    weight, optimizer = stepped(state_dtype=I8, amsgrad=True)
    optimizer.param_groups[0]["amsgrad"] = False
    before = copy.deepcopy(optimizer.state[weight])
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    torch.testing.assert_close(optimizer.state[weight], before, rtol=0, atol=0)
