"""warm_up: one step that leaves nothing behind but choices."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mpkernels import selector
from mpkernels.nn import LinearAct
from mpkernels.optim import AdamW
from mpkernels.selector import disk
from tests.cases import same_bits
from tests.processes import alone, needs_gloo
from tests.races import won_by

B16 = torch.bfloat16


@pytest.fixture(autouse=True)
def raced(monkeypatch, tmp_path):
    """The cases that were timed."""
    raced, measure = [], selector._measure

    def measure_and_tell(case, *rest):
        raced.append(str(case))
        return measure(case, *rest)

    for name, value in (("_is_deterministic", False), ("_known", {}), ("by_key", {})):
        monkeypatch.setattr(selector, name, value)
    monkeypatch.setattr(selector, "_measure", measure_and_tell)
    monkeypatch.setattr(selector, "race", won_by("native"))
    monkeypatch.setattr(disk, "path", lambda: tmp_path / "choices.json")
    disk._read.cache_clear()
    yield raced
    disk._read.cache_clear()


class Net(nn.Module):
    """Has all that a step changes; its outputs are nested."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout()
        self.up, self.down = LinearAct(8, 6), LinearAct(6, 8, activation="relu")
        self.tied = LinearAct(8, 6)
        self.tied.weight = self.up.weight

    def forward(self, x, *, scale=1.0):
        y = self.down(self.up(self.drop(self.norm(x)))) * scale
        return {"y": [y], "z": (self.tied(y), "more", None)}


def everything(model, x):
    """All that could have changed."""
    tensors = [*model.parameters(), *model.buffers(), x]
    return [it.detach().clone() for it in tensors], [it.grad for it in tensors], torch.get_rng_state()


def is_as_before(before, model, x):
    tensors, grads, state = everything(model, x)
    return (
        all(map(same_bits, before[0], tensors))
        and all(old is new for old, new in zip(before[1], grads, strict=True))
        and torch.equal(before[2], state)
    )


@pytest.mark.parametrize("wrap", [lambda model: model, torch.compile], ids=["plain", "compiled"])
@pytest.mark.parametrize("grads", ["no grads", "grads"])
def test_a_step_leaves_choices_and_nothing_else(raced, wrap, grads):
    model, x = Net(), torch.randn(5, 8, requires_grad=True)
    if grads == "grads":
        (model(x)["y"][0].sum() + model(x)["z"][0].sum()).backward()
        selector.forget()
        raced.clear()
    before = everything(model, x)
    selector.warm_up(wrap(model), x, scale=2.0)
    assert is_as_before(before, model, x)
    assert len(raced) == 2
    assert selector.choices() == dict.fromkeys(raced, "native")
    assert all("with grad" in it for it in raced)
    model(x)
    assert len(raced) == 2


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_times_what_it_is_called_under(raced, mode):
    model, x = Net().eval(), torch.randn(5, 8)
    with mode(), torch.autocast("cpu", B16):
        selector.warm_up(model, x)
        cache_is_on = torch.is_autocast_cache_enabled()
        model(x)
    assert cache_is_on
    assert len(raced) == 3  # the tied layer gets what autocast made
    assert all("with grad" not in it and "bfloat16" in it for it in raced)


def test_autocasts_casts_are_not_kept(raced, monkeypatch):
    model, x, kept = LinearAct(8, 6), torch.randn(5, 8), []
    with torch.autocast("cpu", B16):
        selector.warm_up(model, x)
        monkeypatch.setattr("mpkernels.linear.cast_cache._enter_block", lambda *_: kept.append(1) or {})
        model(x)
        assert kept  # nothing was there yet


def test_no_optimizer_hears_of_it():
    """Else one that steps within the backward would."""
    model, x = LinearAct(8, 6), torch.randn(5, 8)
    optimizer = AdamW(model.parameters(), guard=False)
    optimizer.release_grads()
    before = everything(model, x)
    selector.warm_up(model, x)
    assert is_as_before(before, model, x)
    assert not optimizer.state


def test_a_checkpoint_that_computes_again_in_the_backward(raced):
    """With autograd, which it runs its forward without: each has its choice."""

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = LinearAct(8, 6)

        def forward(self, x):
            return checkpoint(self.layer, x, use_reentrant=True)

    model, x = Checkpointed(), torch.randn(5, 8, requires_grad=True)
    before = everything(model, x)
    selector.warm_up(model, x)
    assert sorted("with grad" in it for it in raced) == [False, True]
    assert is_as_before(before, model, x)


def test_an_error_is_the_models(raced):
    with pytest.raises(ValueError, match="x must have weight's 8 features"):
        selector.warm_up(Net().up, torch.randn(5, 7))
    assert selector._asked is None
    Net().up(torch.randn(5, 8))
    assert len(raced) == 1


def test_parts_are_refused():
    model = LinearAct(8, 6)
    model.weight._fsdp_flattened = True
    with pytest.raises(TypeError, match=r"^selector.warm_up: model must have whole parameters, got parts"):
        selector.warm_up(model, torch.randn(5, 8))
    with pytest.raises(TypeError, match=r"^selector.warm_up: process_group must be a torch.distributed.ProcessGroup"):
        selector.warm_up(LinearAct(8, 6), torch.randn(5, 8), process_group=3)


@needs_gloo
def test_a_group_of_one_is_no_company(raced):
    with alone() as group:
        selector.warm_up(nn.parallel.DistributedDataParallel(model := Net()), torch.randn(5, 8), process_group=group)
        model(torch.randn(5, 8))
    assert len(raced) == 2
