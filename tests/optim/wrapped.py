"""The optimizers that tests put into Masters, with the parameters and grads that these tests give them."""

from functools import partial

import torch
from torch.optim import Optimizer

from tests.networks import B16

SHAPES = (6, 4), (5, 7), (3, 3)


class Counting(Optimizer):
    """An optimizer like many published ones: it counts steps in the group, keeps a list in the state, reads a number
    that users have set on a parameter, and gives the parameter another tensor instead of writing to its own."""

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
    """An optimizer that replaces its state in each step, and writes to the grads that it is given."""

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
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1),  # its constructor makes the states
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
    """Return parameters that have the same values in each dtype: 8 significant bits hold them."""
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, generator=generator).to(B16).to(dtype) for shape in SHAPES]
    return list(map(torch.nn.Parameter, values))


def groups(params):
    """Return two groups with different options. The second also has an fp32 parameter, which needs no master."""
    return [{"params": params[:2]}, {"params": [params[2], fp32_parameter()], "lr": 0.05}]


def fp32_parameter():
    return torch.nn.Parameter(torch.linspace(-1, 1, 12).view(4, 3))


def all_params(optimizer):
    return [it for group in optimizer.param_groups for it in group["params"]]


def give_grads(params, seed, dtype, scale=1.0, leave_out=()):
    """Give random grads, rounded to ``dtype``, so that fp32 parameters get the same grads as those of that dtype."""
    generator = torch.Generator().manual_seed(seed)
    for i, param in enumerate(params):
        grad = torch.randn(param.shape, generator=generator)
        grad = grad.to(dtype) if i < len(SHAPES) else grad
        param.grad = None if i in leave_out else grad.to(param.dtype) * scale
