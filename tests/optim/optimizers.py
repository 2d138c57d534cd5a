"""The table of our optimizers: a new one needs a line here, and its rule one in tests/ops/step/rules_table.py."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

from mpkernels.amp import GradScaler
from mpkernels.ops.step.split import join
from mpkernels.optim import SGD, Adam, AdamW, Lion, Masters, Muon
from tests.hard_grads import same_bits
from tests.ops.step.rules_table import LionInPlainTorch


class Line(NamedTuple):
    kind: Callable[..., Any]
    options: dict[str, Any]
    twin: Callable[..., torch.optim.Optimizer]  # the same optimizer in plain torch
    states: tuple[str, ...]  # an fp32 parameter's states in checkpoints, also in the twin's
    lr: float = 1e-2

    def ours(self, params, **more):
        return self.kind(self.taken(params), lr=self.lr, **self.options, **more)

    def theirs(self, params):
        more = {} if self.twin in (LionInPlainTorch, torch.optim.Muon) else {"foreach": False}
        return self.twin(self.taken(params), lr=self.lr, **self.options, **more)

    def taken(self, params):
        """Return the parameters that the optimizer takes: matrices alone for Muon, all for others."""
        if self.twin is not torch.optim.Muon:
            return params
        return [it for it in params if not isinstance(it, torch.Tensor) or it.ndim == 2]

    @property
    def rounded(self):
        """Return the learning rate for ``assert_close``: Muon's updates are rounded to bf16, others to fp32."""
        return self.lr * (2**15 if self.twin is torch.optim.Muon else 1)

    def skip_complex(self):
        """Skip a test with complex parameters, if the optimizer refuses them or has a rule of its own for them."""
        if self.twin in (LionInPlainTorch, torch.optim.Muon):
            pytest.skip("Lion takes no sign of both parts together; Muon refuses complex parameters")


MOMENTS = "exp_avg", "exp_avg_sq", "step"
OPTIMIZERS = {
    "AdamW": Line(AdamW, {"weight_decay": 0.1}, torch.optim.AdamW, MOMENTS),
    "Adam": Line(Adam, {"weight_decay": 0.1}, torch.optim.Adam, MOMENTS),
    "Adam, amsgrad": Line(Adam, {"amsgrad": True}, torch.optim.Adam, ("max_exp_avg_sq", *MOMENTS)),
    "Adam, decoupled": Line(Adam, {"weight_decay": 0.1, "decoupled_weight_decay": True}, torch.optim.Adam, MOMENTS),
    "SGD": Line(SGD, {"weight_decay": 0.1}, torch.optim.SGD, ()),
    "SGD, momentum": Line(SGD, {"momentum": 0.9, "dampening": 0.5}, torch.optim.SGD, ("momentum_buffer",)),
    "SGD, nesterov": Line(
        SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, torch.optim.SGD, ("momentum_buffer",)
    ),
    "Lion": Line(Lion, {"betas": (0.9, 0.99), "weight_decay": 0.1}, LionInPlainTorch, ("exp_avg",), 1e-3),
    "Muon": Line(Muon, {"weight_decay": 0.1}, torch.optim.Muon, ("momentum_buffer",)),
}
each_optimizer = pytest.mark.parametrize("line", OPTIMIZERS.values(), ids=OPTIMIZERS)
OF_ANY_SHAPE = {name: line for name, line in OPTIMIZERS.items() if name != "Muon"}  # all of which have offload, too
each_of_any_shape = pytest.mark.parametrize("line", OF_ANY_SHAPE.values(), ids=OF_ANY_SHAPE)


class Tuned(AdamW):
    """A user's subclass: messages name it."""


def masters_around(kind, params, max_norm=None, guard=None, **options):
    return Masters(kind(params, **options), max_norm=max_norm, guard=guard)


WITH_MASTERS = OPTIMIZERS | {
    f"Masters({kind.__name__})": Line(partial(masters_around, kind), options, kind, ())
    for kind, options in ((torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {"weight_decay": 0.1}))
}
each_with_masters = pytest.mark.parametrize("line", WITH_MASTERS.values(), ids=WITH_MASTERS)
each_duplicate = pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))], ids=["deepcopy", "pickle"]
)


SCALERS = {"ours": GradScaler, "torch's": torch.amp.GradScaler}
each_scaler = pytest.mark.parametrize("whose", SCALERS)
each_scaler_and_none = pytest.mark.parametrize("whose", [*SCALERS, "nobody's"])


def scaler_of(whose, **options):
    """Return a scaler, which is disabled if it is nobody's."""
    return SCALERS.get(whose, torch.amp.GradScaler)("cpu", **options, enabled=whose in SCALERS)


def all_same_bits(some, others):
    return all(map(same_bits, some, others))


def weights(model):
    return [param.detach().clone() for param in model.parameters()]


def true_weights(model, optimizer):
    """Return what the next step starts from: a parameter's master where it has one, else the parameter."""
    found = []
    for param in model.parameters():
        state = optimizer.state[param]
        if "remainder" in state:
            assert state["remainder"].dtype == torch.int16
            found.append(join(param.detach(), state["remainder"]))
        else:
            found.append(state.get("master", param.detach()))
    return found


def saved_numbers(optimizer):
    """Return copies of all numbers in an optimizer's state dict, by parameter and key."""
    states = optimizer.state_dict()["state"]
    return {(number, key): torch.as_tensor(it).clone() for number, state in states.items() for key, it in state.items()}


def assert_same_states(some, others):
    assert some.keys() == others.keys()
    assert all(same_bits(it, others[key]) for key, it in some.items())
