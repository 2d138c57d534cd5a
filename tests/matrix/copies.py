"""Copies, checkpoints and writes to weights, midway."""

import copy
import io
import pickle
import warnings

import torch

from tests.matrix.runner import FIRST, REST, Run, midway, tool


@tool()
def deepcopy(run: Run) -> None:
    run.steps(FIRST)
    before = run.model, run.optimizer, run.scaler
    run.model, run.optimizer, run.scaler = copies = copy.deepcopy(before)
    run.model, run.optimizer, run.scaler = before
    run.steps(REST)  # the copy doesn't go along
    run.model, run.optimizer, run.scaler = copies
    run.steps(REST)


@midway()
def pickle_(run: Run) -> None:
    run.model, run.optimizer, run.scaler = pickle.loads(pickle.dumps((run.model, run.optimizer, run.scaler)))


@torch.no_grad()
def written(run: Run) -> None:
    for param in run.model.parameters():
        param.mul_(0.5).clamp_(-0.1, 0.1)


def write_midway(run: Run) -> None:
    run.steps(FIRST)
    written(run)
    run.steps(REST)


@midway(like=write_midway)
def deepcopy_then_a_write(run: Run) -> None:
    run.model, run.optimizer, run.scaler = copy.deepcopy((run.model, run.optimizer, run.scaler))
    written(run)


@midway(like=write_midway)
def a_write_then_pickle(run: Run) -> None:
    written(run)
    run.model, run.optimizer, run.scaler = pickle.loads(pickle.dumps((run.model, run.optimizer, run.scaler)))


@midway(like=write_midway)
def a_write_then_state_dict(run: Run) -> None:
    written(run)
    run.optimizer.state_dict()


@midway(like=write_midway)
def a_write_through_data_set_anew(run: Run) -> None:
    """``param.data = other``, as prune.remove, functional swaps and many trainers do."""
    for param in run.model.parameters():
        param.data = param.detach().mul(0.5).clamp_(-0.1, 0.1)


@midway(like=write_midway)
def a_write_through_data(run: Run) -> None:
    """``param.data.mul_()``, as Lookahead, weight clipping and merged adapters do."""
    for param in run.model.parameters():
        param.data.mul_(0.5).clamp_(-0.1, 0.1)


@midway()
def weights_swapped_and_back(run: Run) -> None:
    """Swap averaged weights in through ``data``, and back."""
    kept = [param.detach().clone() for param in run.model.parameters()]
    for param in run.model.parameters():
        param.data.copy_(torch.zeros_like(param))
    for param, weight in zip(run.model.parameters(), kept, strict=True):
        param.data.copy_(weight)


@midway()
def state_dict_as_tensors_that_live(run: Run) -> None:
    """A state_dict, which shares memory with its model, is loaded into the same model."""
    run.model.load_state_dict(run.model.state_dict())
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    run.scaler.load_state_dict(run.scaler.state_dict())


def file_of(run: Run) -> dict[str, dict]:
    """Return a checkpoint after saving it to a file and loading it with weights_only."""
    file = io.BytesIO()
    parts = {"model": run.model, "optimizer": run.optimizer, "scaler": run.scaler}
    torch.save({name: it.state_dict() for name, it in parts.items()}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def load_into_others(run: Run, order: tuple[str, ...]) -> None:
    saved = file_of(run)
    run.model = run.drop_in.network(seed=7)
    run.optimizer, run.scaler = run.drop_in.optimizer(run.model.parameters()), run.drop_in.scaler()
    for name in order:
        getattr(run, name).load_state_dict(saved[name])


@midway()
def checkpoint_model_first(run: Run) -> None:
    load_into_others(run, ("model", "scaler", "optimizer"))


@midway()
def checkpoint_optimizer_first(run: Run) -> None:
    load_into_others(run, ("optimizer", "scaler", "model"))


@tool(like=write_midway)
def checkpoint_then_a_write(run: Run) -> None:
    """Weights that differ from the loaded masters win, with a warning."""
    run.steps(FIRST)
    load_into_others(run, ("model", "optimizer", "scaler"))
    written(run)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* are not the weights that the loaded masters were made for")
        run.steps(REST)


@midway()
def swapped_tensors(run: Run) -> None:
    """Weights stay the same Python objects, over other tensors in C++."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        run.model.load_state_dict({name: it.clone() for name, it in run.model.state_dict().items()})
        run.model.to(torch.float64).to(run.drop_in.dtype)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
