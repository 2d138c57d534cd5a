"""AdamW's own options: in groups, in its repr, and beside torch's options."""

import copy
import inspect
import pickle

import pytest
import torch

from mpkernels.amp import GradScaler
from mpkernels.optim import AdamW
from mpkernels.optim.param_state import create
from mpkernels.optim.plan import Plan
from mpkernels.optim.step_plan import Verdict
from tests.networks import B16, assert_close, backward, network


def two_groups(device=None, **options):
    weights = [torch.nn.Parameter(torch.ones(300, dtype=B16, device=device)) for _ in range(2)]
    groups = [{"params": weights[:1]}, {"params": weights[1:], "master": "fp32", "state_dtype": torch.int8}]
    return weights, AdamW(groups, **options)


def keys_and_dtypes(optimizer, weights):
    return [{key: value.dtype for key, value in optimizer.state[weight].items()} for weight in weights]


KEYS_AND_DTYPES = [
    {"step": torch.float32, "exp_avg": B16, "exp_avg_sq": B16, "remainder": torch.int16},
    {
        "step": torch.float32,
        "exp_avg": torch.int8,
        "exp_avg_sq": torch.int8,
        "scales": torch.float32,
        "master": torch.float32,
    },
]


def loaded_again(weights, optimizer):
    """Load a checkpoint that was saved with other options: those of the optimizer decide."""
    other = AdamW([{"params": weights[:1], "master": "fp32"}, {"params": weights[1:]}])
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    other.step()
    optimizer.load_state_dict(other.state_dict())
    return optimizer


OPTIONS = [
    {"master": master, "state_dtype": state_dtype}
    for master, state_dtype in (("split", torch.float32), ("fp32", torch.float32), ("fp32", B16), ("split", torch.int8))
]


def as_it_is(weights, optimizer):
    return optimizer


@pytest.mark.parametrize("use", [as_it_is, loaded_again], ids=lambda it: it.__name__)
def test_a_group_has_masters_and_moments_of_its_own(target, use):
    weights, optimizer = two_groups(target.device, state_dtype=B16)
    optimizer = use(weights, optimizer)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert keys_and_dtypes(optimizer, weights) == KEYS_AND_DTYPES
    assert [group["master"] for group in optimizer.param_groups] == ["split", "fp32"]
    saved = optimizer.state_dict()["param_groups"]
    assert [group["state_dtype"] for group in saved] == ["torch.bfloat16", "torch.int8"]


def test_a_group_steps_as_an_optimizer_of_its_own(target):
    weights, optimizer = two_groups(target.device, lr=0.1)
    alone = [torch.nn.Parameter(weight.detach().clone()) for weight in weights]
    others = [AdamW(alone[:1], lr=0.1), AdamW(alone[1:], lr=0.1, master="fp32", state_dtype=torch.int8)]
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for weight, twin in zip(weights, alone, strict=True):
            weight.grad = twin.grad = torch.randn(300, generator=generator).to(weight)
        for each in (optimizer, *others):
            each.step()
    assert all(map(torch.equal, weights, alone))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_copy_keeps_the_options_of_groups(duplicate):
    _, optimizer = two_groups(max_norm=1.0)
    other = duplicate(optimizer)
    assert [group["state_dtype"] for group in other.param_groups] == [torch.float32, torch.int8]
    assert repr(other) == repr(optimizer)


@pytest.mark.parametrize(
    ("dtype", "guard", "shown"), [(B16, None, "None (on)"), (torch.float32, None, "None (off)"), (B16, False, "False")]
)
def test_repr_shows_whether_the_guard_is_on(dtype, guard, shown):
    assert f", guard: {shown}, " in repr(AdamW([torch.ones(1, dtype=dtype)], guard=guard))


def test_repr_shows_the_options_of_the_optimizer_and_of_groups():
    _, optimizer = two_groups(max_norm=1.0)
    shown = repr(optimizer)
    for line in (
        "max_norm: 1.0, guard: None (on), process_group: None",
        "    master: fp32\n",
        "    state_dtype: torch.int8\n",
    ):
        assert line in shown


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_norm": 1.0}, "AdamW: max_norm must be given to the optimizer, for all parameters, got it in a group"),
        ({"guard": False}, "AdamW: guard must be given to the optimizer, for all parameters, got it in a group"),
        ({"process_group": "mine"}, "AdamW: process_group must be given to the optimizer, for all parameters"),
        ({"masters": "fp32"}, "AdamW: a group has no option 'masters'; did you mean 'master'?"),
        ({"statedtype": B16}, "AdamW: a group has no option 'statedtype'; did you mean 'state_dtype'?"),
        ({"master": "copy"}, "AdamW: master must be 'split' or 'fp32', got 'copy'"),
        ({"state_dtype": torch.float16}, "AdamW: state_dtype must be torch.float32, torch.bfloat16 or torch.int8, got"),
    ],
)
def test_a_group_with_a_bad_option_is_refused(options, text):
    weights = [torch.ones(2, requires_grad=True) for _ in range(2)]
    with pytest.raises(ValueError, match=text.replace("?", r"\?")):
        AdamW([{"params": weights[:1], **options}])
    optimizer = AdamW(weights[:1])
    with pytest.raises(ValueError, match=text.replace("?", r"\?")):
        optimizer.add_param_group({"params": weights[1:], **options})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ({"max_norm": 1.0}, "AdamW: max_norm must be given to the optimizer, for all parameters, got it in a group"),
        ({"MASTER": "fp32"}, "AdamW: a group has no option 'MASTER'; did you mean 'master'?"),
        ({"master": "copy"}, "AdamW: master must be 'split' or 'fp32', got 'copy'"),
    ],
)
def test_an_option_that_a_group_gets_between_steps_is_checked(option, text):
    weight = torch.ones(2, dtype=B16, requires_grad=True)
    optimizer = AdamW([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    before = weight.detach().clone()
    optimizer.param_groups[0].update(option)
    with pytest.raises(ValueError, match=text.replace("?", r"\?")):
        optimizer.step()
    assert torch.equal(weight, before)


@pytest.mark.parametrize("first", OPTIONS, ids=str)
@pytest.mark.parametrize("then", OPTIONS, ids=str)
def test_options_that_change_between_steps_hold_from_the_next_one(target, first, then):
    """The master keeps its bits, and moments are rounded to their new dtype."""
    weights = [torch.nn.Parameter(torch.linspace(0.5, 2, 300).to(target.device, B16)) for _ in range(2)]
    changed, unchanged = AdamW(weights[:1], lr=1e-2, **first), AdamW(weights[1:], lr=1e-2)
    for seed in range(4):
        grad = torch.randn(300, generator=torch.Generator().manual_seed(seed)).to(target.device, B16)
        for weight, optimizer in zip(weights, (changed, unchanged), strict=True):
            weight.grad = grad
            optimizer.step()
        if seed == 1:
            changed.param_groups[0].update(then)
    keys = {key: value.dtype for key, value in changed.state[weights[0]].items()}
    assert keys["exp_avg"] == then["state_dtype"]
    assert ("scales" in keys) == (then["state_dtype"] == torch.int8)
    assert ("master" in keys, "remainder" in keys) == (then["master"] == "fp32", then["master"] == "split")
    exact = all(it["state_dtype"] == torch.float32 for it in (first, then))
    torch.testing.assert_close(
        *weights, rtol=0, atol=0 if exact else 4e-2
    )  # four steps of lr, each off by less than lr


def test_the_optimizers_own_values_may_be_repeated_in_a_group():
    """ZeroRedundancyOptimizer repeats every option in a group."""
    repeated = {"max_norm": 1.0, "guard": True}
    optimizer = AdamW([{"params": [torch.ones(2, requires_grad=True)], **repeated}], **repeated)
    assert optimizer.param_groups[0]["max_norm"] == 1.0


def test_keys_that_users_add_to_a_group_are_kept():
    optimizer = AdamW([{"params": [torch.ones(2, requires_grad=True)], "name": "head", "initial_lr": 1.0, "scale": 2}])
    assert optimizer.param_groups[0]["scale"] == 2


@pytest.mark.parametrize("scaler_kind", [GradScaler, torch.amp.GradScaler])
def test_differentiable_steps_train_and_skip_under_a_scaler_as_torchs(scaler_kind):
    """torch's step asserts that no scale is handed to it. The optimizer has been through a pickle."""
    models = network(), network()
    kinds = AdamW, torch.optim.AdamW
    optimizers = [
        kind(model.parameters(), lr=1e-2, differentiable=True) for kind, model in zip(kinds, models, strict=True)
    ]
    our_model, our_optimizer = pickle.loads(pickle.dumps((models[0], optimizers[0])))
    models, optimizers = (our_model, models[1]), (our_optimizer, optimizers[1])
    scalers = scaler_kind("cpu", init_scale=1024.0), torch.amp.GradScaler("cpu", init_scale=1024.0)
    for seed in range(4):
        for model, optimizer, scaler in zip(models, optimizers, scalers, strict=True):
            backward(model, seed, scale=scaler.scale(torch.ones(())).item())
            if seed == 2:
                model[0].bias.grad[0] = float("inf")
            for param in model.parameters():
                param.requires_grad_(False)
            scaler.step(optimizer)
            scaler.update()
            for param in model.parameters():
                param.requires_grad_(True)
    assert scalers[0].get_scale() == scalers[1].get_scale() == 512.0
    assert_close(*models, 10)


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_guarded_step_is_skipped_if_only_the_scaler_found_an_inf(target, max_norm):
    param = torch.nn.Parameter(torch.ones(3, device=target.device, dtype=B16))
    optimizer = AdamW([param], guard=True, max_norm=max_norm)
    param.grad = torch.ones_like(param)
    optimizer.grad_scale, optimizer.found_inf = (torch.ones((), device=target.device) for _ in range(2))
    optimizer.step()
    assert param.tolist() == [1.0] * 3
    assert optimizer.skipped_steps.item() == 1


def test_a_plan_without_a_half_in_cpp_does_not_look_and_step_in_one_call(target):
    """A plan for one step alone can't look at grads. It must say so, else a guarded step would go on unguarded."""
    param = torch.nn.Parameter(torch.ones(3, device=target.device))
    optimizer = AdamW([param])
    group, state = optimizer.param_groups[0], create(AdamW._rule, param, optimizer.param_groups[0])
    plan = Plan(AdamW._rule, [(group, param, state)], [0], is_for_once=True)
    assert not plan.look_and_step([torch.ones_like(param)], Verdict(has_norm=True), None, None)
    assert (param == 1).all()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"weight_deacy": 0.1}, TypeError, "unexpected keyword argument 'weight_deacy'. Did you mean 'weight_decay'?"),
        ({"state_type": B16}, TypeError, "unexpected keyword argument 'state_type'. Did you mean 'state_dtype'?"),
        ({"zzz": 1}, TypeError, "unexpected keyword argument 'zzz'"),
        ({"max_norm": "1"}, TypeError, "AdamW: max_norm must be a number above 0 or None, got '1'"),
        ({"max_norm": True}, TypeError, "AdamW: max_norm must be a number above 0 or None, got True"),
        ({"max_norm": 0}, ValueError, "AdamW: max_norm must be above 0, got 0; None turns clipping off"),
        ({"guard": "on"}, TypeError, "AdamW: guard must be True, False or None, got 'on'"),
        ({"guard": 0, "max_norm": 1.0}, TypeError, "AdamW: guard must be True, False or None, got 0"),
    ],
)  # fmt: skip
def test_a_bad_option_is_named(options, error, text):
    with pytest.raises(error) as raised:
        AdamW([torch.ones(2, requires_grad=True)], **options)
    assert str(raised.value).endswith(text)


def test_inspect_sees_the_written_signature():
    assert list(inspect.signature(AdamW).parameters)[:4] == ["params", "lr", "betas", "eps"]
