"""AdamW takes the place of torch's: the same calls, the same results."""

import copy

import pytest
import torch

from mpkernels.optim import AdamW
from tests.hard_grads import same_bits
from tests.networks import B16, F16, assert_close, backward, network, train


def test_lr_and_betas_as_tensors_follow_a_scheduler():
    ours, theirs = network(), network()
    options = {"lr": torch.tensor(1e-2), "betas": (torch.tensor(0.8), torch.tensor(0.99))}
    optimizers = [
        kind(model.parameters(), **copy.deepcopy(options))
        for kind, model in ((AdamW, ours), (torch.optim.AdamW, theirs))
    ]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5) for optimizer in optimizers]
    for seed in range(10):
        for model, optimizer, scheduler in zip((ours, theirs), optimizers, schedulers, strict=True):
            backward(model, seed)
            optimizer.step()
            scheduler.step()
    assert_close(ours, theirs, 20, lr=1e-2)


def test_a_parameter_without_a_grad_keeps_its_own_count():
    model = network()
    optimizer = AdamW(model.parameters())
    train(model, optimizer, 2)
    backward(model, 9)
    model[0].bias.grad = None
    optimizer.step()
    assert optimizer.state[model[0].bias]["step"].item() == 2
    assert optimizer.state[model[0].weight]["step"].item() == 3


def test_a_group_may_hold_several_dtypes_and_complex_parameters():
    torch.manual_seed(0)
    params = [torch.randn(5, dtype=dtype) for dtype in (torch.float32, torch.float64, torch.complex64)]
    ours, theirs = ([torch.nn.Parameter(param.clone()) for param in params] for _ in range(2))
    optimizers = AdamW([*ours, torch.nn.Parameter(torch.ones(3, dtype=B16))]), torch.optim.AdamW(theirs, foreach=False)
    for _ in range(5):
        for group, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            sum((param.abs() ** 2).sum() for param in group).backward()
            optimizer.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_hooks_run_around_the_closure_and_zero_grad_drops_the_grads():
    model, seen = network(), []
    optimizer = AdamW(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))

    def closure():
        seen.append("closure")
        assert torch.is_grad_enabled()
        return backward(model, 0)

    assert isinstance(optimizer.step(closure), float)
    assert seen == ["before", "closure", "after"]
    optimizer.zero_grad()
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.float32, {"max_norm": 1.0}),
        (B16, {"state_dtype": torch.int8}),
        (F16, {"amsgrad": True}),
    ],
    ids=str,
)
def test_step_compiles_without_a_graph_break(dtype, options):
    compiled, eager = network(dtype), network(dtype)
    optimizers = AdamW(compiled.parameters(), **options), AdamW(eager.parameters(), **options)
    step = torch.compile(optimizers[0].step, fullgraph=True, backend="aot_eager")
    for seed in range(3):
        backward(compiled, seed)
        backward(eager, seed)
        step()
        optimizers[1].step()
    assert all(map(same_bits, compiled.parameters(), eager.parameters()))
    torch.compiler.reset()


@pytest.mark.parametrize("differentiable", [False, True])
def test_it_steps_where_it_replaces_torchs_by_name(monkeypatch, differentiable):
    monkeypatch.setattr(torch.optim, "AdamW", AdamW)
    leaf = torch.ones(3, requires_grad=True)
    weight = leaf.clone() if differentiable else leaf
    weight.grad = torch.ones(3)
    torch.optim.AdamW([weight], differentiable=differentiable).step()
    assert (weight < 1).all()


def test_differentiable_steps_are_torchs_and_take_none_of_our_options():
    params = [torch.ones(3, requires_grad=True) for _ in range(2)]
    values = []
    for param, kind in zip(params, (AdamW, torch.optim.AdamW), strict=True):
        weight = param.clone()
        weight.grad = param * 2
        kind([weight], differentiable=True).step()
        values.append(torch.autograd.grad(weight.sum(), param)[0])
    assert torch.equal(*values)
    with pytest.raises(ValueError, match="differentiable=True takes fp32 parameters alone"):
        AdamW([torch.ones(3, dtype=B16, requires_grad=True)], differentiable=True)
    optimizer = AdamW([torch.ones(3, requires_grad=True)], differentiable=True)
    with pytest.raises(ValueError, match="differentiable=True takes fp32 parameters alone"):
        optimizer.add_param_group({"params": [torch.ones(3, dtype=B16, requires_grad=True)]})
    assert len(optimizer.param_groups) == 1
    for options in ({"max_norm": 1.0}, {"guard": True}, {"state_dtype": B16}):
        with pytest.raises(ValueError, match="differentiable=True is torch's own step, without max_norm, guard and"):
            AdamW([torch.ones(3, requires_grad=True)], differentiable=True, **options)
