"""mpkernels.tune runs one step, and leaves nothing behind except its choices."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mpkernels
from mpkernels import selector
from mpkernels.linear import key_and_case
from mpkernels.nn import MLP, LinearAct
from mpkernels.ops.linear.block_kind import ROUNDING
from mpkernels.optim import AdamW
from mpkernels.selector import tune
from mpkernels.selector.timing import Timed
from tests.hard_grads import same_bits
from tests.linear.choosing import empty_selector
from tests.processes import alone, needs_gloo

B16 = torch.bfloat16


@pytest.fixture(autouse=True)
def timed(monkeypatch):
    """Return the list of timed cases; a kernel of ours is the fastest in each."""
    timed = []

    def time_ways(trial, names, device):
        timed.append(trial)
        return Timed({names[0]: 1.0, "torch": 2.0}, {})

    empty_selector(monkeypatch)
    monkeypatch.setattr(tune, "time_ways", time_ways)
    return timed


class Net(nn.Module):
    """A network with all that a step changes, and with nested outputs."""

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
    """Return all state that could have changed."""
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
def test_a_step_leaves_choices_and_nothing_else(timed, wrap, grads):
    model, x = Net(), torch.randn(5, 8, requires_grad=True)
    if grads == "grads":
        (model(x)["y"][0].sum() + model(x)["z"][0].sum()).backward()
    before = everything(model, x)
    report = mpkernels.tune(wrap(model), x, scale=2.0)
    assert is_as_before(before, model, x)
    assert len(timed) == len(report.timed) == 2
    assert all("with grad" in it for it in report.timed)
    model(x)
    assert {name: selector.choices()[name] for name in report.timed} == dict.fromkeys(report.timed, "native")
    assert len(timed) == 2


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_tune_times_the_modes_that_it_is_called_under(timed, mode):
    model, x = Net().eval(), torch.randn(5, 8)
    with mode(), torch.autocast("cpu", B16):
        report = mpkernels.tune(model, x)
        cache_is_on = torch.is_autocast_cache_enabled()
        model(x)
    assert cache_is_on
    assert len(timed) == 2
    assert all("with grad" not in it and "bfloat16" in it for it in report.timed)


def test_tune_leaves_no_casts_of_autocast(monkeypatch):
    model, x, kept = LinearAct(8, 6), torch.randn(5, 8), []
    with torch.autocast("cpu", B16):
        mpkernels.tune(model, x)
        monkeypatch.setattr("mpkernels.linear.cast_cache._enter_block", lambda *_: kept.append(1) or {})
        model(x)
        assert kept  # tune had left no cast


def test_tune_runs_no_hook_of_an_optimizer():
    """An optimizer that steps inside the backward must not step."""
    model, x = LinearAct(8, 6), torch.randn(5, 8)
    optimizer = AdamW(model.parameters(), guard=False)
    optimizer.release_grads()
    before = everything(model, x)
    mpkernels.tune(model, x)
    assert is_as_before(before, model, x)
    assert not optimizer.state


def test_both_forwards_of_a_checkpoint_are_timed(timed):
    """The checkpoint runs its forward first without autograd, then with it. Each run has its own choice."""

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = LinearAct(8, 6)

        def forward(self, x):
            return checkpoint(self.layer, x, use_reentrant=True)

    model, x = Checkpointed(), torch.randn(5, 8, requires_grad=True)
    before = everything(model, x)
    report = mpkernels.tune(model, x)
    assert sorted("with grad" in it for it in report.timed) == [False, True]
    assert is_as_before(before, model, x)


def test_on_a_gpu_tritons_kernels_are_offered(monkeypatch):
    monkeypatch.setattr(key_and_case, "kernels_on", lambda device, op: ["native", "triton", "reference"])
    case = key_and_case._case("linear_act", torch.device("cuda"), (8, 6, 6), (B16,), "gelu_tanh", True, "", False)
    assert case.kernels == ("native", "triton", "torch")


@pytest.mark.parametrize("dtype", [torch.float32, B16], ids=str)
def test_rounded_gradients_are_offered_where_autocast_casts_what_trains(timed, dtype):
    with torch.autocast("cpu", B16):
        mpkernels.tune(MLP(8, 6, dtype=dtype), torch.randn(5, 8, dtype=dtype))
    [case] = selector.tuned
    assert (ROUNDING in case.kernels) == (dtype == torch.float32)


def test_an_error_of_the_model_leaves_nothing_behind(timed):
    with pytest.raises(ValueError, match="x must have weight's 8 features"):
        mpkernels.tune(Net().up, torch.randn(5, 7))
    assert selector._asked is None
    Net().up(torch.randn(5, 8))
    assert timed == []


def test_a_model_on_the_meta_device_is_refused():
    message = r"^tune: model must have memory, got fc1_weight on the meta device; to_empty gives it some"
    with pytest.raises(ValueError, match=message):
        mpkernels.tune(MLP(8, 16, 8).to("meta"), torch.randn(5, 8, device="meta"))


def test_a_model_that_holds_parts_of_parameters_is_refused():
    model = LinearAct(8, 6)
    model.weight._fsdp_flattened = True
    with pytest.raises(TypeError, match=r"^tune: model must have whole parameters, got parts"):
        mpkernels.tune(model, torch.randn(5, 8))
    with pytest.raises(TypeError, match=r"^tune: process_group must be a torch.distributed.ProcessGroup"):
        mpkernels.tune(LinearAct(8, 6), torch.randn(5, 8), process_group=3)


@needs_gloo
def test_in_a_group_of_one_process_tune_works_as_without(timed):
    with alone() as group:
        mpkernels.tune(nn.parallel.DistributedDataParallel(model := Net()), torch.randn(5, 8), process_group=group)
        model(torch.randn(5, 8))
    assert len(timed) == 2


def test_tune_times_anew_in_each_call_and_counts_until_forget(timed):
    layer, x = LinearAct(8, 6, activation="silu"), torch.randn(5, 8)
    case, *_ = mpkernels.tune(layer, x).timed
    mpkernels.tune(layer, x)
    assert len(timed) == 2
    layer(x)
    assert selector.choices()[case] == "native"
    selector.forget()
    layer(x)
    assert selector.choices()[case] == "torch"  # as the table says


def test_a_graph_for_any_number_of_rows_follows_what_was_tuned_last(monkeypatch):
    layer = LinearAct(8, 6)
    for rows, best in ((4, "native"), (8, "torch"), (4, "native"), (8, "torch")):
        seconds = {"native": 1.0, "torch": 1.0 if best == "native" else 0.1}
        monkeypatch.setattr(tune, "time_ways", lambda *_, seconds=seconds: Timed(seconds, {}))
        mpkernels.tune(layer, torch.randn(rows, 8))
        case, *_ = selector.tuned
        assert selector.choose(case._replace(rows=None)) == best


def test_the_report_is_a_table_of_ratios():
    text = str(tune.TuneReport({"mlp": Timed({"native": 1.0, "torch": 1.5}, {})}))
    assert text.split("\n")[1].split() == ["mlp", "native", "1.50"]
    nothing = mpkernels.tune(torch.nn.Linear(4, 4), torch.ones(2, 4))
    assert str(nothing) == "Nothing was timed: the model has none of mpkernels' layers, blocks or fused MLPs."
