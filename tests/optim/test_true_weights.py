"""Averages of true weights are those of the same training in fp32, bit for bit."""

import copy
import sys

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from mpkernels.optim import SGD, AdamW, Masters, TrueWeights, true_weight
from tests.networks import B16
from tests.processes import alone, needs_gloo


def adamw(params, **options):
    return AdamW(params, lr=1e-5, **options)


def masters(params):
    return Masters(torch.optim.SGD(params, lr=1e-5))


KINDS = {
    "split": (adamw, adamw),
    "fp32": (lambda params: adamw(params, master="fp32"), adamw),
    "Masters": (masters, lambda params: torch.optim.SGD(params, lr=1e-5)),
}


def ema(model):
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999)).float()


class LikeTimm:
    """The update of timm's ModelEmaV3(model, dtype=torch.float32)."""

    def __init__(self, model):
        self.module = copy.deepcopy(model).float()

    @torch.no_grad()
    def update_parameters(self, model):
        pairs = zip(self.module.state_dict().values(), model.state_dict().values(), strict=True)
        mean, now = map(list, zip(*(pair for pair in pairs if pair[0].is_floating_point()), strict=True))
        torch._foreach_lerp_(mean, now, weight=0.001)


class LikeDiffusers:
    """The update of diffusers' EMAModel, which averages parameters that need a grad, and copies all others."""

    def __init__(self, model):
        self.module = torch.nn.ParameterList(param.detach().clone().float() for param in model.parameters())

    @torch.no_grad()
    def update_parameters(self, model):
        for mean, now in zip(self.module, model.parameters(), strict=True):
            mean.sub_(0.001 * (mean - now)) if now.requires_grad else mean.copy_(now)


def averaged(make, dtype, make_ema, wrap):
    """Return the averages after 40 steps. The grads don't depend on the weights, so that those of two dtypes agree."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4))
    model[0].bias.requires_grad_(False)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(param.to(B16))
    model.to(dtype)
    optimizer, average = make(model.parameters()), make_ema(model)
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator).to(B16).to(param.dtype)
        optimizer.step()
        average.update_parameters(wrap(model, optimizer))
    return list(average.module.state_dict().values())


@pytest.mark.parametrize("make_ema", [ema, LikeTimm, LikeDiffusers])
@pytest.mark.parametrize("kind", KINDS)
def test_an_average_of_true_weights_is_fp32s(kind, make_ema):
    ours, twin = KINDS[kind]
    exact = averaged(twin, torch.float32, make_ema, lambda model, _: model)
    assert all(map(torch.equal, averaged(ours, B16, make_ema, TrueWeights), exact))


def test_an_average_moves_as_far_as_fp32s():
    """A weight that goes from 1 to 0 ends at 0.86 after 300 steps at 0.999, or near: in bf16 it would stand still."""
    param = torch.nn.Parameter(torch.ones(1, dtype=B16))
    model, optimizer = torch.nn.ParameterList([param]), SGD([param], lr=1 / 300)
    average = ema(model)
    for _ in range(300):
        param.grad = torch.ones_like(param)
        optimizer.step()
        average.update_parameters(TrueWeights(model, optimizer))
    expected = 1 - 1 / 300
    for step in range(2, 301):
        expected = 0.999 * expected + 0.001 * (1 - step / 300)
    assert average.module[0].item() == pytest.approx(expected, abs=1e-5)
    assert expected == pytest.approx(0.86, abs=0.005)


def test_each_weight_comes_from_its_optimizer_and_others_as_they_are():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)).to(B16)
    model[2].float()
    tied = torch.nn.Sequential(model, model[0])
    optimizers = [adamw(model[0].parameters()), masters(model[1].parameters())]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.ones_like(param)
        optimizer.step()
    view = TrueWeights(tied, *optimizers)
    weights, plain = dict(view.named_parameters()), dict(tied.named_parameters())
    assert weights.keys() == plain.keys()
    for name, weight in weights.items():
        state = {**optimizers[0].state, **optimizers[1].state}.get(plain[name], {})
        assert torch.equal(weight, true_weight(plain[name], state).float())
        assert torch.equal(weight.to(plain[name].dtype), plain[name])
        assert (weight.dtype, "remainder" in state) == (torch.float32, not name.startswith("0.2"))
    assert plain["0.2.weight"] is weights["0.2.weight"]
    saved = view.state_dict()
    assert saved.keys() == tied.state_dict().keys()
    assert torch.equal(saved["1.weight"], weights["0.0.weight"])
    assert [it.dtype for it in view.buffers()] == [it.dtype for it in tied.buffers()]
    assert torch.equal(next(iter(view.parameters())), weights["0.0.weight"])


@needs_gloo
def test_a_dtensor_has_a_true_weight():
    with alone():
        mesh = init_device_mesh("cpu", (1,))
        param = torch.nn.Parameter(DTensor.from_local(torch.ones(4, dtype=B16), mesh, [Shard(0)]))
        optimizer = adamw([param])
        param.grad = torch.ones_like(param)
        optimizer.step()
        weight = true_weight(param, optimizer.state[param])
        assert isinstance(weight, DTensor)
        assert weight.full_tensor().tolist() == pytest.approx([1 - 1e-5] * 4, abs=2e-7)


def test_a_remainder_of_another_dtype_is_no_master():
    param = torch.nn.Parameter(torch.ones(3, dtype=B16))
    optimizer = adamw([param])
    param.grad = torch.ones_like(param)
    optimizer.step()
    exact = true_weight(param, optimizer.state[param])
    state = dict(optimizer.state[param])
    assert torch.equal(true_weight(param, state | {"remainder": state["remainder"].view(B16)}), exact)  # as saved
    param.data = param.data.half()
    assert torch.equal(true_weight(param, state), param)


def test_other_objects_are_refused():
    model = torch.nn.Linear(1, 1)
    with pytest.raises(TypeError, match=r"TrueWeights: optimizers must be of mpkernels.optim, got SGD, which has no"):
        TrueWeights(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(TypeError, match="TrueWeights: model must be"):
        TrueWeights(model.parameters())
    assert sys.modules["mpkernels.optim"].TrueWeights is TrueWeights
