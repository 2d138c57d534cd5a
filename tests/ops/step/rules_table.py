"""The rules, one line each, and rows of parameters as their ops take them. A new rule costs a line here."""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import mpkernels
from mpkernels.ops import grad_stats
from mpkernels.ops.step.op import StepOps
from mpkernels.ops.step.rules.adam import adam_
from mpkernels.ops.step.rules.adamw import adamw_
from mpkernels.ops.step.rules.lion import lion_
from mpkernels.ops.step.rules.sgd import sgd_
from mpkernels.ops.step.split import join, split
from tests.hard_grads import same_bits
from tests.quick import covering

F32, F16, B16, F64, I8 = torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8
WEIGHTS = [(F32, "none"), (B16, "split"), (B16, "fp32"), (F16, "split"), (F16, "fp32")]


class LionInPlainTorch(torch.optim.Optimizer):
    """Lion's update as Chen et al. write it ("Symbolic discovery of optimization algorithms", program 1)."""

    def __init__(self, params, lr, betas, weight_decay):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in (it for it in group["params"] if it.grad is not None):
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                update = torch.sign(beta1 * m + (1 - beta1) * p.grad)
                p.sub_(group["lr"] * (update + group["weight_decay"] * p))
                m.copy_(beta2 * m + (1 - beta2) * p.grad)


class Line(NamedTuple):
    ops: StepOps
    hypers: dict[str, tuple[float, float]]  # hyperparameter -> its values in two groups
    twin: Callable[..., torch.optim.Optimizer]  # the same optimizer in plain torch
    # Returns the twin's options, from a group's hyperparameters and whether the parameter has the optional states.
    options: Callable[[dict[str, float], bool], dict[str, Any]]


LR = {"lr": (1e-2, 1e-3)}
ADAMW = LR | {"beta1": (0.9, 0.8), "beta2": (0.999, 0.99), "weight_decay": (0.01, 0.0), "eps": (1e-8, 1e-6)}
SGD = LR | {"weight_decay": (0.1, 0.0), "momentum": (0.9, 0.5), "dampening": (0.25, 0.0), "nesterov": (0.0, 0.0)}
NESTEROV = SGD | {"dampening": (0.0, 0.0), "nesterov": (1.0, 1.0)}


def _adamw_options(hypers, amsgrad):
    options = {"betas": (hypers["beta1"], hypers["beta2"]), "amsgrad": amsgrad, "foreach": False}
    return options | {key: hypers[key] for key in ("lr", "weight_decay", "eps")}


def _sgd_options(hypers, has_momentum):
    options = hypers if has_momentum else hypers | {"momentum": 0, "dampening": 0, "nesterov": 0}
    return options | {"nesterov": options["nesterov"] == 1, "foreach": False}


def _lion_options(hypers, _):
    betas = hypers["beta1"], hypers["beta2"]
    return {"lr": hypers["lr"], "betas": betas, "weight_decay": hypers["weight_decay"]}


RULES = {
    "adamw": Line(adamw_, ADAMW, torch.optim.AdamW, _adamw_options),
    "adam": Line(adam_, ADAMW | {"decoupled": (0.0, 0.0)}, torch.optim.Adam, _adamw_options),
    "adam, decoupled": Line(adam_, ADAMW | {"decoupled": (1.0, 1.0)}, torch.optim.AdamW, _adamw_options),
    "sgd": Line(sgd_, SGD, torch.optim.SGD, _sgd_options),
    "sgd, nesterov": Line(sgd_, NESTEROV, torch.optim.SGD, _sgd_options),
    "lion": Line(
        lion_,
        {"lr": (1e-3, 1e-4), "beta1": (0.9, 0.8), "beta2": (0.99, 0.95), "weight_decay": (0.1, 0.0)},
        LionInPlainTorch,
        _lion_options,
    ),
}  # fmt: skip


class Rows:
    """Parameters in every combination of what is given, in two groups, and their states before the first step."""

    def __init__(
        self, line, sizes=(37,), weights=WEIGHTS, grads=(F32, F16, B16), states=(F32, B16, I8), device="cpu",
        in_pairs=False,
    ):  # fmt: skip
        """With ``in_pairs``, take only as many combinations as it takes for each two values to meet in one."""
        self.line, self.rule, self.device = line, line.ops.rule, device
        has_optional = (False, True) if self.rule.needed < len(self.rule.states) else (False,)
        self.cases = list(itertools.product(sizes, weights, grads, states, has_optional))
        if in_pairs:
            self.cases = covering(2, self.cases, lambda case: dict(enumerate(case)))
        self.lists = {name: [] for name in self.rule.lists if name != "grads"}
        generator = torch.Generator().manual_seed(0)
        for size, (dtype, master), _, state, has_all in self.cases:
            weight = torch.randn(size, generator=generator, dtype=torch.float64).to(F64 if dtype == F64 else F32)
            halves = split(weight, dtype) if master == "split" else (weight.to(dtype), weight)
            row = {"params": halves[0], "masters": torch.empty(0) if master == "none" else halves[1]}
            kept = self.rule.states if has_all else self.rule.states[: self.rule.needed]
            for key, name in zip(self.rule.states, self.rule.state_lists, strict=True):
                code_of_0 = -128 if state == I8 and key in self.rule.not_negative else 0
                row[name] = torch.full((size if key in kept else 0,), code_of_0, dtype=state)
            row["scales"] = torch.zeros(len(kept) * -(-size // 256) if state == I8 else 0)
            row["steps"] = torch.zeros(())
            for name, tensor in row.items():
                self.lists[name].append(tensor.clone().to(device))

    def grads(self, seed):
        generator = torch.Generator().manual_seed(seed)
        made = [torch.randn(size, generator=generator, dtype=F64).to(dtype) for size, _, dtype, *_ in self.cases]
        return [it.to(self.device) for it in made]

    def group_of(self, i):
        return int(i >= len(self.lists["params"]) // 2)

    def step(self, grads, hypers=None, maximize=(False, True), max_norm=math.inf, on_device=(), report=None, **scalars):
        hypers, count = self.line.hypers if hypers is None else hypers, len(self.lists["params"])
        numbers = {name: value for name, value in scalars.items() if value is not None}
        given = {name: torch.full((), value, device=self.device) for name, value in numbers.items()}
        self.line.ops(
            self.lists["params"], grads, *(self.lists[name] for name in self.rule.lists[2:]),
            [count // 2, -(-count // 2)], *map(list, hypers.values()), list(maximize), list(on_device),
            max_norm=max_norm, report=report,
            total_sumsq=grad_stats(grads).total_sumsq if max_norm < math.inf else None, **given,
        )  # fmt: skip

    def weight(self, i):
        """Return a parameter's weight with all bits that its master adds."""
        param, master = self.lists["params"][i], self.lists["masters"][i]
        return param if not master.numel() else master if master.dtype == F32 else join(param, master)

    def differences(self, other):
        return [
            (name, case)
            for name, tensors in self.lists.items()
            for case, a, b in zip(self.cases, tensors, other.lists[name], strict=True)
            if not same_bits(a.cpu(), b.cpu())
        ]


def rows_on(target, line, **kinds):
    """Return rows on the target's device: fewer for interpreted kernels, which take milliseconds a row."""
    return Rows(line, device=target.device, in_pairs=target.is_interpreted, **kinds)


def assert_same_steps(target, line, steps=3, model=None, **arguments):
    """Step with the target's kernel and with the reference, from the same start, and assert equal bits. Grads are only
    read."""
    ours, reference = rows_on(target, line, **model or {}), Rows(line, in_pairs=target.is_interpreted, **model or {})
    for seed in range(steps):
        grads, references = ours.grads(seed), reference.grads(seed)
        ours.step(grads, **arguments)
        with mpkernels.backend("reference"):
            reference.step(references, **arguments)
        as_before = reference.grads(seed)
        assert all(same_bits(a.cpu(), b) for a, b in zip(grads + references, as_before * 2, strict=True))
    assert ours.differences(reference) == []
    return ours
