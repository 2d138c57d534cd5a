"""The op: every kernel gives the reference's bits, and each step of a Model is compared with AdamW in fp64."""

import itertools
import math

import pytest
import torch

import mpkernels
from mpkernels.ops import grad_stats
from mpkernels.ops.step.rules.adamw import adamw_
from mpkernels.ops.step.split import join, split
from tests.cases import same_bits
from tests.ops.step import oracle

F32, F16, B16, F64, I8 = torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8
WEIGHTS = [(F32, "none"), (B16, "split"), (B16, "fp32"), (F16, "split"), (F16, "fp32")]
STATES = ("params", "masters", "scales", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "steps")


class Model:
    """Lists of tensors as adamw_ takes them: two groups, in every combination of dtypes."""

    def __init__(
        self, sizes=(37, 1000), weights=WEIGHTS, grads=(F32, F16, B16), states=(F32, B16, I8), amsgrad=(False, True),
        shape=None, device="cpu",
    ):  # fmt: skip
        self.device = device
        self.cases = list(itertools.product(sizes, weights, grads, states, amsgrad))
        generator = torch.Generator().manual_seed(0)
        for name in STATES:
            setattr(self, name, [])
        for size, (dtype, master), _, state, amsgrad in self.cases:
            weight = torch.randn(size, generator=generator, dtype=torch.float64).to(F64 if dtype == F64 else F32)
            halves = split(weight, dtype) if master == "split" else (weight.to(dtype), weight)
            self.params.append(halves[0])
            self.masters.append(torch.empty(0) if master == "none" else halves[1])
            self.exp_avgs.append(torch.zeros(size, dtype=state))
            zero = -128 if state == I8 else 0  # its code
            self.exp_avg_sqs.append(torch.full((size,), zero, dtype=state))
            self.max_exp_avg_sqs.append(torch.full((size if amsgrad else 0,), zero, dtype=state))
            self.scales.append(torch.zeros((3 if amsgrad else 2) * -(-size // 256) if state == I8 else 0))
            self.steps.append(torch.zeros(()))
        for name in STATES:
            setattr(self, name, [tensor.clone().to(device) for tensor in getattr(self, name)])

    def grads(self, seed):
        generator = torch.Generator().manual_seed(seed)
        return [
            torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).to(self.device)
            for size, _, dtype, *_ in self.cases
        ]

    def step(self, grads, grad_scale=None, found_inf=None, max_norm=math.inf, on_device=(), report=None, **changed):
        def device_scalar(value, dtype=F32):
            return None if value is None else torch.full((), value, dtype=dtype, device=self.device)

        first = len(self.params) // 3
        hyper = {"lr": [1e-2, 1e-3], "beta1": [0.9, 0.8], "beta2": [0.999, 0.99], "weight_decay": [0.01, 0.0]}
        hyper |= {"eps": [1e-8, 1e-6], "maximize": [False, True]} | changed
        before = oracle.snapshot(self)
        adamw_.step(
            self.params, grads, self.exp_avgs, self.exp_avg_sqs, self.max_exp_avg_sqs, self.masters, self.scales,
            self.steps,
            [first, len(self.params) - first], *hyper.values(), list(on_device), device_scalar(grad_scale),
            device_scalar(found_inf), grad_stats(grads).total_sumsq if max_norm < math.inf else None,
            max_norm, None, None, report,
        )  # fmt: skip
        for group, name in itertools.product((0, 1), ("lr", "beta1", "beta2")) if on_device else ():
            tensor = on_device[3 * group + ("lr", "beta1", "beta2").index(name)]
            hyper[name] = [tensor.item() if i == group and tensor.numel() else x for i, x in enumerate(hyper[name])]
        signs = [-1 if it else 1 for it in hyper.pop("maximize")]
        of_groups = [oracle.Hyper(*numbers) for numbers in zip(*hyper.values(), signs, strict=True)]
        of_each = [of_groups[i >= first] for i in range(len(self.params))]
        oracle.assert_step(before, oracle.snapshot(self), grads, of_each, grad_scale, found_inf, max_norm)

    def differences(self, other):
        return [
            (name, case)
            for name in STATES
            for case, a, b in zip(self.cases, getattr(self, name), getattr(other, name), strict=True)
            if not same_bits(a.cpu(), b.cpu())
        ]


def beside_the_reference(target, act, **kinds):
    """Return the target's model after ``act(model)``, where the same has left the same bits in the reference's."""
    ours, reference = Model(device=target.device, **kinds), Model(**kinds)
    act(ours)
    with mpkernels.backend("reference"):
        act(reference)
    assert ours.differences(reference) == []
    return ours


def assert_same_steps(target, steps=3, model=None, **arguments):
    def act(model):
        for seed in range(steps):
            model.step(model.grads(seed), **arguments)

    return beside_the_reference(target, act, **model or {})


@pytest.mark.parametrize(("grad", "grad_scale", "moves"), [(3e38, 0.5, False), (3e38, 1.0, True), (3e38, 4.0, True)])
def test_nothing_moves_where_unscaling_overflows(target, grad, grad_scale, moves):
    """As it may with a scale below 1, though every grad is finite."""
    model = Model(sizes=(1,), weights=WEIGHTS[:1], grads=(F32,), states=(F32,), device=target.device)
    before = [tensor.clone() for tensor in model.params]
    grads = [torch.full_like(grad, 0.0) for grad in model.grads(0)]
    grads[-1].fill_(grad)
    model.step(grads, grad_scale=grad_scale, max_norm=1.0)
    assert {step.item() for step in model.steps} == {float(moves)}
    assert all(map(same_bits, model.params, before)) != moves


def test_a_norm_beyond_fp32_is_no_overflow_without_a_scale(target):
    model = Model(sizes=(2,), weights=WEIGHTS[:1], grads=(F32,), states=(F32,), device=target.device)
    model.step([torch.full_like(grad, 3e38) for grad in model.grads(0)], max_norm=1.0)
    assert {step.item() for step in model.steps} == {1.0}


def test_empty_parameters_count_their_steps(target):
    model = Model(sizes=(0, 5), grads=(F32,), device=target.device)
    model.step(model.grads(0))
    assert {step.item() for step in model.steps} == {1.0}


@pytest.mark.parametrize("which", [("lr",), ("beta1", "beta2")], ids="+".join)
def test_some_hyperparameters_on_the_device(target, which):
    """lr or betas as tensors give what the same floats give."""
    options = {"sizes": (33,), "states": (F32,), "weights": WEIGHTS[:2], "device": target.device}
    by_value, on_device = Model(**options), Model(**options)
    numbers = {"lr": [1e-2, 1e-3], "beta1": [0.9, 0.8], "beta2": [0.999, 0.99]}
    numbers = {name: torch.tensor(x, dtype=F32).double().tolist() for name, x in numbers.items()}
    tensors = [
        torch.full((), x[group], dtype=F32, device=target.device) if name in which else torch.empty(0)
        for group in (0, 1)
        for name, x in numbers.items()
    ]
    for seed in range(2):
        by_value.step(by_value.grads(seed), **numbers)
        wrong = numbers | {name: [0.5, 0.5] for name in which}
        on_device.step(on_device.grads(seed), on_device=tensors, **wrong)
    assert on_device.differences(by_value) == []


def test_no_weight_moves_without_a_gradient_and_rate(target):
    """What torch.distributed.checkpoint does to make states: zero grads, lr = 0. Not one bit may change."""
    model, untouched = (Model(sizes=(300,), device=target.device) for _ in range(2))
    model.step([torch.zeros_like(grad) for grad in model.grads(0)], lr=[0.0, 0.0])
    assert {name for name, _ in model.differences(untouched)} == {"steps"}


def test_masters_are_the_weights(target):
    """After any step the 16-bit weight is its master's rounding, and both schemes hold the same master."""
    model = Model(sizes=(500,), states=(F32,), grads=(F32,), device=target.device)
    for seed in range(3):
        model.step(model.grads(seed))
    for (_, (dtype, kind), *_), param, master in zip(model.cases, model.params, model.masters, strict=True):
        if kind == "fp32":
            assert same_bits(param, master.to(dtype))
        elif kind == "split":
            assert same_bits(split(join(param, master), dtype)[0], param)
