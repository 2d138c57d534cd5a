"""Muon: how near it is to torch's and to exact Newton-Schulz, what steps together, what a step costs, what it refuses.
What all optimizers have in common is tested with the tables of optimizers.py and rules_table.py."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mpkernels.optim import Masters, Muon, newton_schulz
from tests.hard_grads import same_bits
from tests.networks import B16
from tests.optim.optimizers import all_same_bits, assert_same_states, saved_numbers
from tests.optim.test_plan import random_tensors

SHAPES = [(8, 8), (24, 8), (8, 24), (1, 5), (5, 1), (8, 8), (30, 20), (120, 100), (0, 4)]
COEFFICIENTS = 3.4445, -4.7750, 2.0315


def matrices(shapes=SHAPES, dtype=torch.float32, device="cpu"):
    return [torch.nn.Parameter(it.to(device, dtype)) for it in random_tensors(0, shapes)]


def give(params, seed, bad=None):
    for i, (param, grad) in enumerate(zip(params, random_tensors(seed, [it.shape for it in params]), strict=True)):
        param.grad = grad.to(param.device, param.dtype)
        if i == bad:
            param.grad.view(-1)[-1] = math.inf


OPTIONS = [
    {},
    {"nesterov": False, "weight_decay": 0.0},
    {"adjust_lr_fn": "match_rms_adamw", "momentum": 0.3},
    {"adjust_lr_fn": "original", "ns_steps": 2, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3},
    {"ns_steps": 0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_it_follows_torchs_within_the_roundings_of_newton_schulz(target, options, dtype):
    """torch iterates in bf16, of whose roundings those of the weakest directions grow 485-fold. Momentum is torch's but
    for fp32's roundings."""
    ours, theirs = matrices(dtype=dtype, device=target.device), matrices(dtype=dtype)
    optimizer, reference = Muon(ours, lr=0.02, **options), torch.optim.Muon(theirs, lr=0.02, **options)
    for seed in range(3):
        give(ours, seed)
        give(theirs, seed)
        optimizer.step()
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        rate = 0.2 * max(a.shape) ** 0.5 if "momentum" in options else max(1, a.shape[0] / max(1, a.shape[1])) ** 0.5
        torch.testing.assert_close(a.cpu(), b, rtol=0, atol=3 * 0.02 * rate * 2**-4)
        buffers = optimizer.state[a]["momentum_buffer"].cpu(), reference.state[b]["momentum_buffer"]
        torch.testing.assert_close(*buffers, rtol=1e-6, atol=1e-6)


def test_a_matrix_of_one_number_moves_as_torchs():
    ours, theirs = (torch.nn.Parameter(torch.ones(1, 1)) for _ in range(2))
    for param, kind in ((ours, Muon), (theirs, torch.optim.Muon)):
        param.grad = torch.full_like(param, 3.0)
        kind([param], lr=0.1).step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0.1 * 2**-6)


def exact(matrix):
    a, b, c = COEFFICIENTS
    x = matrix.double() / matrix.double().norm()
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


@pytest.mark.parametrize("shape", [(8, 8), (5, 60), (64, 64), (96, 200), (256, 256)], ids=str)
def test_it_is_no_further_off_exact_newton_schulz_than_torch(shape):
    """Small matrices are iterated in fp32. Others as torch does it, so that only luck in rounding differs."""
    group = {"ns_coefficients": COEFFICIENTS, "ns_steps": 5, "eps": 1e-7}
    given = torch.stack(random_tensors(0, [shape] * 20)).to(B16)
    found, squares = given.clone(), [0.0, 0.0]
    newton_schulz.orthogonalize_(found, [group] * 20)
    for matrix, ours in zip(given, found, strict=True):
        theirs = torch.nn.Parameter(torch.zeros(shape))
        theirs.grad = matrix.float()
        torch.optim.Muon([theirs], lr=1.0, momentum=0.0, weight_decay=0.0, adjust_lr_fn="original").step()
        want, ratio = exact(matrix), max(1, shape[0] / shape[1]) ** 0.5
        for i, update in enumerate((ours.double(), -theirs.detach().double() / ratio)):
            squares[i] += (update - want).square().sum().item()
    assert squares[0] <= squares[1] * 1.1


@pytest.mark.parametrize("dtype", [torch.float32, B16], ids=str)
def test_matrices_step_as_they_would_alone(target, dtype):
    """Whatever else has their shape: groups with other numbers, matrices without a grad or of zeros, NaN."""
    numbers = {"momentum": 0.5}, {"ns_steps": 3}, {"ns_coefficients": (2.0, -1.5, 0.5)}, {"eps": 1.0}, {"lr": 0.1}
    together, alone = matrices([(6, 5)] * 12, dtype, target.device), matrices([(6, 5)] * 12, dtype, target.device)
    groups = [{"params": together[2 * i : 2 * i + 2], **it} for i, it in enumerate((*numbers, {}))]
    optimizer = Muon(groups, guard=False)
    optimizers = [Muon([it], guard=False, **(*numbers, {})[i // 2]) for i, it in enumerate(alone)]
    for seed in range(3):
        for params in (together, alone):
            give(params, seed, bad=7 if seed == 2 else None)
            params[2].grad.zero_()
            if seed == 1:
                params[1].grad = params[11].grad = None
        optimizer.step()
        for it in optimizers:
            it.step()
    assert all_same_bits(together, alone)
    assert together[7].isnan().all()
    assert not any(it.isnan().any() for i, it in enumerate(together) if i != 7)


def test_a_matrix_without_a_grad_neither_decays_nor_moves_its_momentum():
    params = matrices([(4, 4)] * 3)
    optimizer = Muon(params, weight_decay=0.5)
    give(params, 0)
    optimizer.step()
    weight, state = params[1].detach().clone(), optimizer.state[params[1]]["momentum_buffer"].clone()
    give(params, 1)
    params[1].grad = None
    optimizer.step()
    assert same_bits(weight, params[1].detach())
    assert same_bits(state, optimizer.state[params[1]]["momentum_buffer"])


def test_groups_that_come_and_matrices_that_are_frozen_and_thawed_step_as_torchs_do():
    ours, theirs = matrices([(6, 5)] * 4), matrices([(6, 5)] * 4)
    optimizers = Muon(ours[:2], lr=0.02), torch.optim.Muon(theirs[:2], lr=0.02)
    for step in range(5):
        for params, optimizer in zip((ours, theirs), optimizers, strict=True):
            give(params, step)
            if step == 1:
                optimizer.add_param_group({"params": params[2:], "lr": 0.1})
            params[0].requires_grad_(step != 2)
            if step == 2:
                params[0].grad = None
            optimizer.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=5 * 0.1 * 2**-4)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_step_that_fails_moves_nothing(target, is_late):
    params = matrices([(6, 5)] * 3, device=target.device)
    optimizer = Muon(params)
    give(params, 0)
    if is_late:
        optimizer.step()
    before, states = [it.detach().clone() for it in params], saved_numbers(optimizer)
    for key, bad, error, text in (
        ("ns_steps", 100, ValueError, "Number of steps must be less than 100 for computational efficiency"),
        ("ns_coefficients", (1.0, 2.0), ValueError, "Coefficients must be a tuple of exactly 3 values"),
        ("weight_decay", "0.1", TypeError, "Muon: weight_decay must be a number, got '0.1'"),
    ):
        good, optimizer.param_groups[0][key] = optimizer.param_groups[0][key], bad
        with pytest.raises(error, match=f"^{text}$"):
            optimizer.step()
        optimizer.param_groups[0][key] = good
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3, device=target.device))]})
    optimizer.param_groups[1]["params"][0].grad = torch.ones(3, device=target.device)
    with pytest.raises(ValueError, match=r"^Param gradient must be a 2D matrix$"):
        optimizer.step()
    assert all_same_bits(before, [it.detach() for it in params])
    assert_same_states({it: tensor for it, tensor in saved_numbers(optimizer).items() if it in states}, states)


def test_momentum_moves_once_in_a_step_that_finds_a_weight_in_another_dtype():
    """The first weight, which other optimizers look at first, is as it was."""
    params = [torch.nn.Parameter(torch.randn(8, 8)) for _ in range(2)]
    optimizer = Muon(params, lr=0.1)
    for param in params:
        param.grad = torch.randn(8, 8).to(B16).float()
    optimizer.step()
    before = [optimizer.state[param]["momentum_buffer"].clone() for param in params]
    params[1].grad, grad = None, params[1].grad
    params[1].data = params[1].data.to(B16)
    params[1].grad = grad.to(B16)
    optimizer.step()
    for param, buffer in zip(params, before, strict=True):
        want = buffer.lerp(param.grad.float(), 0.05)
        torch.testing.assert_close(optimizer.state[param]["momentum_buffer"], want)


def test_what_torch_refuses_is_refused_by_the_same_words():
    for params, options in (
        ([torch.ones(3)], {}),
        (matrices(), {"lr": -1.0}),
        (matrices(), {"lr": torch.ones(2)}),
        (matrices(), {"momentum": -1.0}),
        (matrices(), {"weight_decay": -1.0}),
        (matrices(), {"adjust_lr_fn": "other"}),
    ):
        texts = []
        for kind in (Muon, torch.optim.Muon):
            with pytest.raises(ValueError) as raised:  # noqa: PT011  the texts are compared
                kind(params, **options)
            texts.append(str(raised.value))
        assert texts[0] == texts[1]
    param = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))
    param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match=r"^Muon does not support complex parameters$"):
        Muon([param]).step()
    with pytest.raises(ValueError, match=r"^Muon: offload must be False: Newton-Schulz on the host would take longer"):
        Muon(matrices(), offload=True)


def gpt2(width, layers=24):
    return [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * layers


class Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        assert op is not torch.ops.aten._local_scalar_dense.default
        self.count += 1
        return op(*args, **(kwargs or {}))


@pytest.mark.kernels("reference", "native")  # the others only replace two of the ops
@pytest.mark.parametrize(("shapes", "most"), [([(8, 8)] * 16, 60), (gpt2(8), 200), (gpt2(64), 200)])
@pytest.mark.parametrize("options", [{}, {"max_norm": 1.0, "state_dtype": torch.int8}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, B16], ids=str)
def test_a_step_dispatches_few_ops_and_reads_nothing_back(target, shapes, most, dtype, options):
    params = matrices(shapes, dtype, target.device)
    optimizer = Muon(params, **options)
    for seed in range(2):
        give(params, seed)
        with Ops() as ops:
            optimizer.step()
    assert ops.count <= most


def test_torchs_step_dispatches_more_than_25_ops_a_matrix():
    params = matrices([(8, 8)] * 16)
    give(params, 0)
    optimizer = torch.optim.Muon(params)
    with Ops() as ops:
        optimizer.step()
    assert ops.count > 25 * 16


def test_large_stacks_are_iterated_part_by_part(monkeypatch):
    whole, parted = matrices([(6, 5)] * 7), matrices([(6, 5)] * 7)
    optimizers = Muon(whole), Muon(parted)
    give(whole, 0)
    give(parted, 0)
    optimizers[0].step()
    monkeypatch.setattr(newton_schulz, "_AT_ONCE", 60)
    optimizers[1].step()
    for a, b in zip(whole, parted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-3 * 2**-7)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.int8], ids=str)
def test_matrices_may_lie_in_any_order_of_memory(target, state_dtype):
    plain, turned = matrices([(6, 5), (6, 5), (40, 7)], device=target.device), []
    for i, param in enumerate(plain):
        laid_out = param.detach().mT.contiguous().mT if i else param.detach().clone()
        turned.append(torch.nn.Parameter(laid_out))
    assert turned[1].stride() == (1, 6)
    optimizers = [Muon(it, state_dtype=state_dtype) for it in (plain, turned)]
    for seed in range(2):
        for params, optimizer in zip((plain, turned), optimizers, strict=True):
            give(params, seed)
            optimizer.step()
    for a, b in zip(plain, turned, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-3 * 2**-4)


def test_masters_of_torchs_muon_and_it_go_the_same_way():
    ours, theirs = matrices(dtype=B16), matrices(dtype=B16)
    optimizers = Muon(ours, lr=0.02, max_norm=1.0), Masters(torch.optim.Muon(theirs, lr=0.02), max_norm=1.0)
    for seed in range(4):
        for params, optimizer in zip((ours, theirs), optimizers, strict=True):
            give(params, seed, bad=2 if seed == 1 else None)
            optimizer.step()
            assert optimizer.step_was_skipped == (seed == 1)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=2**-7, atol=4 * 0.02 * 2**-3)
