"""split_params gives Muon a model's hidden matrices, and leaves vectors, embeddings and the head to another."""

import pytest
import torch
from torch import nn

from mpkernels.amp import clip_grad_norm_
from mpkernels.optim import AdamW, Muon, split_params
from tests.networks import network
from tests.optim.optimizers import each_scaler_and_none, scaler_of


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.word, self.place = nn.Embedding(50, 8), nn.Embedding(16, 8)
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(8), nn.Linear(16, 8, bias=False)
        self.turn, self.filter = nn.Parameter(torch.ones(8, 8)), nn.Conv1d(8, 8, 3)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.word.weight

    def get_output_embeddings(self):
        return self.head


def names(model, **options):
    name_of = {param: name for name, param in model.named_parameters()}
    matrices, others = split_params(model, **options)
    assert set(matrices).isdisjoint(others)
    assert {*matrices, *others} == set(model.parameters())
    return [name_of[it] for it in matrices]


def test_embeddings_the_head_and_what_is_no_matrix_are_others():
    assert names(Tied()) == ["turn", "up.weight", "down.weight"]
    assert names(nn.Sequential(Tied())) == ["0.turn", "0.up.weight", "0.down.weight"]
    assert names(network()) == ["0.weight"]  # the last Linear is the head
    assert names(nn.LayerNorm(3)) == []


def test_names_win():
    assert names(network(), matrices="3") == ["0.weight", "3.weight"]
    assert names(Tied(), matrices=["word", "place.*"]) == [
        "turn",
        "word.weight",
        "place.weight",
        "up.weight",
        "down.weight",
    ]
    assert names(Tied(), matrices=["*"], others=["turn", "word", "d*"]) == ["place.weight", "up.weight"]


def test_bad_arguments_are_named():
    with pytest.raises(
        ValueError, match=r"^split_params: others must name modules or parameters of the model, got 'x'$"
    ):
        split_params(network(), others="x")
    with pytest.raises(TypeError, match=r"^split_params: model must be a torch.nn.Module, got list$"):
        split_params([])


@each_scaler_and_none
@pytest.mark.parametrize("clips", [False, True])
def test_both_optimizers_train_the_whole_model_under_one_scaler(whose, clips):
    model, scaler = network(), scaler_of(whose, init_scale=8.0)
    before = [it.detach().clone() for it in model.parameters()]
    matrices, others = split_params(model)
    optimizers = Muon(matrices, guard=True), AdamW(others, guard=True)
    for bad in (torch.inf, 0.0):
        model.zero_grad()
        scaler.scale(model(torch.ones(2, 20)).sum()).backward()
        matrices[0].grad[0, 0] += bad
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        if clips:
            assert clip_grad_norm_(model.parameters(), 1.0).isfinite() == (bad == 0)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    assert [int(it.skipped_steps) for it in optimizers] == [1, 0]
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
