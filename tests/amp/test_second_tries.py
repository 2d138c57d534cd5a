"""An iteration whose scaler has failed at any op can be given up: the next one trains as if nothing had been."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mpkernels.amp import GradScaler
from mpkernels.optim import AdamW
from tests.networks import B16, F16, one_thread

__all__ = ["one_thread"]  # a fixture that each test uses


class Failing(TorchDispatchMode):
    """Raises at the op of this number; ``is_late``: once it has run."""

    def __init__(self, number, is_late, error):
        super().__init__()
        self.number, self.is_late, self.error = number, is_late, error

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.number -= 1
        if self.number == -1 and not self.is_late:
            raise self.error
        result = op(*args, **(kwargs or {}))
        if self.number == -1:
            raise self.error
        return result


class Run:
    """A parameter of each dtype, whose unscaled grads are 1, and one without elements."""

    def __init__(self):
        self.params = [nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (torch.float32, B16, F16, torch.float64)]
        self.params += [nn.Parameter(torch.ones(2, 3).t()), nn.Parameter(torch.ones(0))]
        self.optimizer, self.scaler = AdamW(self.params, lr=0.1), GradScaler("cpu", init_scale=1024.0)
        scale = self.scaler.scale(torch.ones(())).item()
        for param in self.params:
            param.grad = torch.full_like(param, scale)

    def call(self, method):
        getattr(self.scaler, method)(self.optimizer)


@pytest.mark.parametrize("is_late", [False, True], ids=["before the op", "after the op"])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("method", ["unscale_", "step"])
def test_the_iteration_after_one_that_failed(method, in_place, is_late):
    """If unscale_ or step fails, the grads of the next iteration are unscaled once and stepped with once."""
    for number in range(1000):
        run = Run()
        try:
            with Failing(number, is_late, torch.OutOfMemoryError):
                run.call(method)
        except torch.OutOfMemoryError:
            pass
        else:
            assert number > 2
            return
        before = [(param.detach().clone(), steps_of(run, param)) for param in run.params]
        old = [param.grad for param in run.params]  # which somebody may keep
        run.optimizer.zero_grad(set_to_none=not in_place)
        for param in run.params:
            grad = torch.full_like(param, run.scaler.get_scale())
            param.grad = grad if param.grad is None else param.grad.add_(grad)
        run.call("unscale_")
        assert all((param.grad == 1).all() for param in run.params), number
        run.call("step")
        for param, (weight, steps) in zip(run.params, before, strict=True):
            assert (param < weight).all(), number
            assert steps_of(run, param) == steps + 1
        assert all(grad is param.grad for grad, param in zip(old, run.params, strict=True)) == in_place


def steps_of(run, param):
    return run.optimizer.state[param].get("step", torch.zeros(())).item()
