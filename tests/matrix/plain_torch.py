"""Tools of torch itself, in one process."""

import copy
import io
import pickle
import warnings

import torch
from torch import nn

from tests.matrix.runner import ALL, FIRST, REST, Run, tool


@tool()
def hooks(run: Run) -> None:
    """Of every kind, that change nothing."""
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


@tool()
def deepcopy(run: Run) -> None:
    run.steps(FIRST)
    before = run.model, run.optimizer, run.scaler
    run.model, run.optimizer, run.scaler = copies = copy.deepcopy(before)
    run.model, run.optimizer, run.scaler = before
    run.steps(REST)  # the copy doesn't go along
    run.model, run.optimizer, run.scaler = copies
    run.steps(REST)


@tool()
def pickle_(run: Run) -> None:
    run.steps(FIRST)
    run.model, run.optimizer, run.scaler = pickle.loads(pickle.dumps((run.model, run.optimizer, run.scaler)))
    run.steps(REST)


@torch.no_grad()
def written(run: Run) -> None:
    for param in run.model.parameters():
        param.mul_(0.5).clamp_(-0.1, 0.1)


def write_midway(run: Run) -> None:
    run.steps(FIRST)
    written(run)
    run.steps(REST)


@tool(like=write_midway)
def deepcopy_then_a_write(run: Run) -> None:
    run.steps(FIRST)
    run.model, run.optimizer, run.scaler = copy.deepcopy((run.model, run.optimizer, run.scaler))
    written(run)
    run.steps(REST)


@tool(like=write_midway)
def a_write_then_pickle(run: Run) -> None:
    run.steps(FIRST)
    written(run)
    run.model, run.optimizer, run.scaler = pickle.loads(pickle.dumps((run.model, run.optimizer, run.scaler)))
    run.steps(REST)


@tool(like=write_midway)
def a_write_then_state_dict(run: Run) -> None:
    run.steps(FIRST)
    written(run)
    run.optimizer.state_dict()
    run.steps(REST)


@tool(like=write_midway)
def a_write_through_data_set_anew(run: Run) -> None:
    """``param.data = other``, as prune.remove, functional swaps and many trainers do."""
    run.steps(FIRST)
    for param in run.model.parameters():
        param.data = param.detach().mul(0.5).clamp_(-0.1, 0.1)
    run.steps(REST)


@tool(like=write_midway)
def a_write_through_data(run: Run) -> None:
    """``param.data.mul_()``, as Lookahead, weight clipping and merged adapters do."""
    run.steps(FIRST)
    for param in run.model.parameters():
        param.data.mul_(0.5).clamp_(-0.1, 0.1)
    run.steps(REST)


def optimizer_made_anew(run: Run) -> None:
    run.steps(FIRST)
    run.optimizer = run.drop_in.optimizer(run.model.parameters())
    run.steps(REST)


@tool(like=optimizer_made_anew)
def state_cleared(run: Run) -> None:
    run.steps(FIRST)
    run.optimizer.state.clear()
    run.steps(REST)


@tool()
def shared_memory(run: Run) -> None:
    """The weights move, and stay the same tensors."""
    run.steps(FIRST)
    run.model.share_memory()
    run.steps(REST)


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

    def backward(number):
        def loss(weights):
            run.model = lambda x: torch.func.functional_call(model, weights, x)
            return run.scaler.scale(run.loss(number, part) / len(run.parts))

        for part in run.parts:
            grads = torch.func.grad(loss)(dict(zip(names, (it.detach() for it in params), strict=True)))
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
        run.optimizer.param_groups[0]["lr"] = 1e-2 * 0.5**number
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


@tool()
def weights_swapped_and_back(run: Run) -> None:
    """As averages are tried: other weights in, through ``data``, and the own back."""
    run.steps(FIRST)
    own = [param.detach().clone() for param in run.model.parameters()]
    for param in run.model.parameters():
        param.data.copy_(torch.zeros_like(param))
    for param, it in zip(run.model.parameters(), own, strict=True):
        param.data.copy_(it)
    run.steps(REST)


@tool()
def state_dict_as_tensors_that_live(run: Run) -> None:
    """A state_dict shares memory with its model, and loads into itself."""
    run.steps(FIRST)
    run.model.load_state_dict(run.model.state_dict())
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    run.scaler.load_state_dict(run.scaler.state_dict())
    run.steps(REST)


def file_of(run: Run, **how: bool) -> dict:
    """A checkpoint as it comes back from a file."""
    file = io.BytesIO()
    parts = {"model": run.model, "optimizer": run.optimizer, "scaler": run.scaler}
    torch.save({name: it.state_dict() for name, it in parts.items()}, file)
    file.seek(0)
    return torch.load(file, weights_only=True, **how)


def resumed(run: Run, order: tuple[str, ...], change=None) -> None:
    run.steps(FIRST)
    saved = file_of(run)
    run.model = run.drop_in.network(seed=7)
    run.optimizer, run.scaler = run.drop_in.optimizer(run.model.parameters()), run.drop_in.scaler()
    for name in order:
        getattr(run, name).load_state_dict(saved[name])
    run.steps(REST)


@tool()
def checkpoint_model_first(run: Run) -> None:
    resumed(run, ("model", "scaler", "optimizer"))


@tool()
def checkpoint_optimizer_first(run: Run) -> None:
    resumed(run, ("optimizer", "scaler", "model"))


@tool(like=write_midway)
def checkpoint_then_a_write(run: Run) -> None:
    run.steps(FIRST)
    saved = file_of(run)
    run.model = run.drop_in.network(seed=7)
    run.optimizer, run.scaler = run.drop_in.optimizer(run.model.parameters()), run.drop_in.scaler()
    for name, state in saved.items():
        getattr(run, name).load_state_dict(state)
    written(run)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "AdamW: 4 parameters are not the weights that the loaded masters were made for")
        run.steps(REST)
