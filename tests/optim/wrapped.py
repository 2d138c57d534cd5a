"""Optimizers that Masters is put around, as data: their names, and how each is made of parameters or groups."""

from functools import partial

import torch
from torch.optim import Optimizer

from tests.networks import B16

SHAPES = (6, 4), (5, 7), (3, 3)


class Counting(Optimizer):
    """As many a published class: it counts steps in the group, keeps a list in the state, reads what users have noted
    on a parameter, and gives it another tensor instead of writing to the one that is there."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if not state:
                        state["history"] = []
                    state["history"] = [*state["history"][-1:], param.grad.clone()]
                    width = getattr(param, "width", 1.0)
                    param.data = param - group["lr"] / group["count"] / width * sum(state["history"])


class InPlaceOnGrads(Optimizer):
    """It replaces its state in each step, and writes to the grads that it is given."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in filter(lambda it: it.grad is not None, group["params"]):
                before = self.state[param].get("before", torch.zeros_like(param))
                self.state[param] = {"before": param.detach().clone()}
                param.grad.mul_(group["lr"]).add_(before, alpha=1e-3)
                param.sub_(param.grad)


OPTIMIZERS = {
    "Muon": partial(torch.optim.Muon, lr=0.02),
    "Muon, lr a tensor": partial(torch.optim.Muon, lr=torch.tensor(0.02), adjust_lr_fn="match_rms_adamw"),
    "SGD": partial(torch.optim.SGD, lr=0.1, weight_decay=0.01),
    "SGD, momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "SGD, fused": partial(torch.optim.SGD, lr=0.1, fused=True),
    "Adam": torch.optim.Adam,
    "Adam, fused": partial(torch.optim.Adam, fused=True),
    "Adam, foreach": partial(torch.optim.Adam, foreach=True, amsgrad=True, maximize=True),
    "AdamW": torch.optim.AdamW,
    "Adafactor": partial(torch.optim.Adafactor, lr=0.1),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1),  # whose constructor makes the states
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "ASGD": partial(torch.optim.ASGD, t0=2.0),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": partial(torch.optim.RMSprop, centered=True, momentum=0.9),
    "Rprop": torch.optim.Rprop,
    "a class that counts in groups": Counting,
    "a class that writes to grads": InPlaceOnGrads,
}


def parameters(dtype, seed=0):
    """Alike in each dtype: such as 8 bits can hold."""
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, generator=generator).to(B16).to(dtype) for shape in SHAPES]
    return list(map(torch.nn.Parameter, values))


def groups(params):
    """Two, with different options, and an fp32 parameter, which needs no master, in the second."""
    return [{"params": params[:2]}, {"params": [params[2], wide()], "lr": 0.05}]


def wide():
    return torch.nn.Parameter(torch.linspace(-1, 1, 12).view(4, 3))


def every(optimizer):
    return [it for group in optimizer.param_groups for it in group["params"]]


def give_grads(params, seed, dtype, scale=1.0, leave_out=()):
    """The same grads whatever dtype the parameters have: those of 16-bit parameters were rounded to that dtype."""
    generator = torch.Generator().manual_seed(seed)
    for i, param in enumerate(params):
        grad = torch.randn(param.shape, generator=generator)
        grad = grad.to(dtype) if i < len(SHAPES) else grad
        param.grad = None if i in leave_out else grad.to(param.dtype) * scale
