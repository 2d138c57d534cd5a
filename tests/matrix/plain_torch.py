"""Tools of torch itself that train in one process, in other ways."""

import warnings

import torch

from tests.matrix.runner import ALL, FIRST, PARTS, REST, Run, midway, tool


@tool()
def hooks(run: Run) -> None:
    """Hooks of every kind change nothing."""
    run.model.register_forward_pre_hook(lambda _, args: (args[0].requires_grad_(),))  # else backward hooks warn
    for module in run.model.modules():
        module.register_forward_pre_hook(lambda _, args: args)
        module.register_forward_hook(lambda _, args, output: output)
        module.register_full_backward_pre_hook(lambda _, grads: grads)
        module.register_full_backward_hook(lambda _, inputs, outputs: inputs)
    for param in run.model.parameters():
        param.register_hook(lambda grad: grad)
        param.register_post_accumulate_grad_hook(lambda _: None)
    run.optimizer.register_step_pre_hook(lambda *_: None)
    run.optimizer.register_step_post_hook(lambda *_: None)
    run.steps()


def optimizer_made_anew(run: Run) -> None:
    run.steps(FIRST)
    run.optimizer = run.drop_in.optimizer(run.model.parameters())
    run.steps(REST)


@midway(like=optimizer_made_anew)
def state_cleared(run: Run) -> None:
    run.optimizer.state.clear()


@midway()
def shared_memory(run: Run) -> None:
    """The weights move, and stay the same tensors."""
    run.model.share_memory()


@tool()
def compiled(run: Run) -> None:
    run.model = torch.compile(run.model, backend="aot_eager", fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch's own
        run.steps()


def one_step(run: Run) -> None:
    run.steps([0])


@tool(like=one_step)
def functorch(run: Run) -> None:
    """Grads by torch.func, put where the optimizer looks."""
    names = [name for name, _ in run.model.named_parameters()]
    model, params = run.model, list(run.model.parameters())

    def loss(weights, number, part):
        run.model = lambda x: torch.func.functional_call(model, weights, x)
        return run.scaler.scale(run.loss(number, part) / len(run.parts))

    def backward(number):
        for part in run.parts:
            weights = {name: param.detach() for name, param in zip(names, params, strict=True)}
            grads = torch.func.grad(loss)(weights, number, part)
            for name, param in zip(names, params, strict=True):
                param.grad = grads[name] if param.grad is None else param.grad + grads[name]
        run.model = model

    run.backward = backward
    run.steps([0])


@tool()
def zero_grad_to_zeros(run: Run) -> None:
    zero_grad = run.optimizer.zero_grad
    run.optimizer.zero_grad = lambda: zero_grad(set_to_none=False)
    run.steps()
    del run.optimizer.zero_grad


def halving_by_hand(run: Run) -> None:
    for number in ALL:
        run.optimizer.param_groups[0]["lr"] = run.drop_in.options["lr"] * 0.5**number
        run.steps([number])


@tool(like=halving_by_hand)
def lr_scheduler(run: Run) -> None:
    schedule = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.5)
    for number in ALL:
        run.steps([number])
        schedule.step()


@tool()
def averaged_model(run: Run) -> None:
    averaged = torch.optim.swa_utils.AveragedModel(run.model)
    for number in ALL:
        run.steps([number])
        averaged.update_parameters(run.model)


def with_a_half(run: Run) -> None:
    run.parts = PARTS[:1]
    run.steps()


@tool(like=with_a_half)
def an_optimizer_of_each_in_backward(run: Run) -> None:
    """As torch's tutorial saves memory."""
    run.parts = PARTS[:1]
    optimizers = {param: run.drop_in.optimizer([param]) for param in run.model.parameters()}

    def step(param: torch.Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in optimizers:
        param.register_post_accumulate_grad_hook(step)
    for number in ALL:
        run.backward(number)
    run.optimizer.state = {param: it.state[param] for param, it in optimizers.items()}
