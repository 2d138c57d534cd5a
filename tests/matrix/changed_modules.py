"""Judges tools that change a model's weights or modules, so that the training differs from the one without the tool."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tests.hard_grads import same_bits
from tests.matrix.runner import FIRST, REST, Result, Run, batch, tool


class Recorded:
    """The weights and grads that an optimizer got in each step, and the weights that it made."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.given: list[list[tuple[Tensor, Tensor | None]]] = []
        self.made: list[list[Tensor]] = []
        optimizer.register_step_pre_hook(lambda it, *_: self.given.append([*map(_weight_and_grad, _params(it))]))
        optimizer.register_step_post_hook(lambda it, *_: self.made.append([_whole(it) for it in _params(it)]))

    def result(self) -> Result:
        return {f"step {i}: {j}": it for i, step in enumerate(self.made) for j, it in enumerate(step)}

    def replayed(self, run: Run) -> Result:
        """Replay the steps with an optimizer that sees these weights and grads and nothing else. What a tool wrote to
        a weight is written in place."""
        optimizer = run.drop_in.optimizer([torch.nn.Parameter(weight) for weight, _ in self.given[0]])
        replay = Recorded(optimizer)
        for given in self.given:
            if added := given[len(_params(optimizer)) :]:
                optimizer.add_param_group({"params": [torch.nn.Parameter(weight) for weight, _ in added]})
            for param, (weight, grad) in zip(_params(optimizer), given, strict=True):
                if param.dtype != weight.dtype:
                    param.grad, param.data = None, weight
                elif not same_bits(param, weight):
                    param.detach().copy_(weight)
                param.grad_dtype = None  # any
                param.grad = grad
            optimizer.step()
        return replay.result()


def _params(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the trained parameters. Quantised weights aren't trained, and can't be compared."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [param for param in params if type(param) is torch.nn.Parameter or hasattr(param, "full_tensor")]


def _weight_and_grad(param: Tensor) -> tuple[Tensor, Tensor | None]:
    return _whole(param), None if param.grad is None else _whole(param.grad)


def _whole(tensor: Tensor) -> Tensor:
    """Return a copy, of a DTensor a whole one."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def changes_modules(change: Callable[[Run], Iterator[None]]) -> Callable[[Run], Iterator[None]]:
    """Make ``change`` a row. Until it yields, it changes the run before the training; the rest of it comes midway."""

    def trained(run: Run) -> Result:
        phases = change(run)
        next(phases)
        run.optimizer = run.drop_in.optimizer(run.model.parameters())
        run.record = Recorded(run.optimizer)
        run.steps(FIRST)
        next(phases, None)
        run.steps(REST)
        return run.record.result() | run.scaler_result()

    def applied(run: Run) -> Result:
        for _ in change(run):
            pass
        return outputs_and_grads(run)

    def function(run: Run) -> Result:
        return trained(run) if run.drop_in.first_layer is None else applied(run)

    def oracle(run: Run) -> Result:
        if run.drop_in.first_layer is not None:
            return applied(Run(run.drop_in.with_torchs_layer()))
        if run.scaler.is_enabled():
            return trained(Run(run.drop_in.with_the_other_scaler()))
        return run.record.replayed(run)

    function.__name__ = change.__name__
    tool(oracle=oracle)(function)
    return change


def outputs_and_grads(run: Run) -> Result:
    """Return outputs and grads of one row of inputs, so that no sum of the backward depends on its order. Sums of the
    forward are exact. The sign of a zero differs between CPUs, so it is dropped."""
    inputs, targets = (it[:1] for it in batch(0, 0, run.dtype))
    outputs = run.model(inputs)
    (outputs - targets).float().square().sum().backward()
    grads = {name: it.grad for name, it in run.model.named_parameters() if it.grad is not None}
    return {name: it + 0.0 for name, it in {"outputs": outputs.detach(), **grads}.items()}


def set_exact(run: Run, seed: int = 3) -> None:
    """Set weights that a tool has drawn to numbers whose products with halves add up without rounding."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in run.model.parameters():
            if param.requires_grad:
                param.copy_(torch.randint(-2, 3, param.shape, generator=generator) / 4)
