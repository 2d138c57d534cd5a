"""Options of optimizers beyond torch's: in groups, in the repr, in copies, and between steps."""

import pytest
import torch

from mpkernels.optim import AdamW, Masters
from tests.networks import B16
from tests.optim.optimizers import Tuned, each_duplicate

I8 = torch.int8


def two_groups(device=None, **options):
    weights = [torch.nn.Parameter(torch.ones(300, dtype=B16, device=device)) for _ in range(2)]
    groups = [{"params": weights[:1]}, {"params": weights[1:], "master": "fp32", "state_dtype": I8}]
    return weights, AdamW(groups, **options)


OF_FIRST = {"step": torch.float32, "exp_avg": B16, "exp_avg_sq": B16, "remainder": torch.int16}
OF_SECOND = {"step": torch.float32, "exp_avg": I8, "exp_avg_sq": I8, "scales": torch.float32, "master": torch.float32}


def loaded_again(weights, optimizer):
    """Load a checkpoint that was saved with other options: those of the optimizer decide."""
    other = AdamW([{"params": weights[:1], "master": "fp32"}, {"params": weights[1:]}])
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    other.step()
    optimizer.load_state_dict(other.state_dict())


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_group_has_masters_and_moments_of_its_own(target, is_loaded):
    weights, optimizer = two_groups(target.device, state_dtype=B16)
    if is_loaded:
        loaded_again(weights, optimizer)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    dtypes = [{key: value.dtype for key, value in optimizer.state[weight].items()} for weight in weights]
    assert dtypes == [OF_FIRST, OF_SECOND]
    assert [group["master"] for group in optimizer.param_groups] == ["split", "fp32"]
    saved = optimizer.state_dict()["param_groups"]
    assert [group["state_dtype"] for group in saved] == ["torch.bfloat16", "torch.int8"]


def test_a_group_steps_as_an_optimizer_of_its_own(target):
    weights, optimizer = two_groups(target.device, lr=0.1)
    alone = [torch.nn.Parameter(weight.detach().clone()) for weight in weights]
    others = [AdamW(alone[:1], lr=0.1), AdamW(alone[1:], lr=0.1, master="fp32", state_dtype=I8)]
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for weight, twin in zip(weights, alone, strict=True):
            weight.grad = twin.grad = torch.randn(300, generator=generator).to(weight)
        for each in (optimizer, *others):
            each.step()
    assert all(map(torch.equal, weights, alone))


@each_duplicate
def test_a_copy_keeps_the_options(duplicate):
    _, optimizer = two_groups(max_norm=1.0, offload=True)
    other = duplicate(optimizer)
    assert [group["state_dtype"] for group in other.param_groups] == [torch.float32, I8]
    assert repr(other) == repr(optimizer)
    assert other.offload
    assert other._offload is not optimizer._offload


@pytest.mark.parametrize(
    ("dtype", "guard", "shown"), [(B16, None, "None (on)"), (torch.float32, None, "None (off)"), (B16, False, "False")]
)
def test_repr_shows_whether_the_guard_is_on(dtype, guard, shown):
    shown_by_ours = repr(AdamW([torch.ones(1, dtype=dtype)], guard=guard))
    assert f", guard: {shown}, " in shown_by_ours
    assert "offload" not in shown_by_ours
    shown_by_masters = repr(Masters(torch.optim.Adam([torch.ones(1, dtype=dtype)]), guard=guard))
    assert shown_by_masters.startswith(f"Masters (max_norm: None, guard: {shown}) around\nAdam (\nParameter Group 0\n")


def test_repr_shows_the_options_of_the_optimizer_and_of_groups():
    shown = repr(two_groups(max_norm=1.0, offload=True)[1])
    for line in (
        "max_norm: 1.0, guard: None (on), process_group: None, offload: True\n",
        "    master: fp32\n",
        "    state_dtype: torch.int8\n",
    ):
        assert line in shown


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_norm": 1.0}, "Tuned: max_norm must be given to the optimizer, for all parameters, got it in a group"),
        ({"guard": False}, "Tuned: guard must be given to the optimizer, for all parameters, got it in a group"),
        ({"process_group": "mine"}, "Tuned: process_group must be given to the optimizer, for all parameters"),
        ({"offload": True}, "Tuned: offload must be given to the optimizer, for all parameters"),
        ({"masters": "fp32"}, r"Tuned: a group has no option 'masters'; did you mean 'master'\?"),
        ({"MASTER": "fp32"}, r"Tuned: a group has no option 'MASTER'; did you mean 'master'\?"),
        ({"statedtype": B16}, r"Tuned: a group has no option 'statedtype'; did you mean 'state_dtype'\?"),
        ({"offloaded": True}, r"Tuned: a group has no option 'offloaded'; did you mean 'offload'\?"),
        ({"master": "copy"}, "Tuned: master must be 'split' or 'fp32', got 'copy'"),
        ({"state_dtype": torch.float16}, "Tuned: state_dtype must be torch.float32, torch.bfloat16 or torch.int8, got"),
        ({"state_dtype": "torch.int9"}, "Tuned: state_dtype must be torch.float32, .* got 'torch.int9'$"),
    ],
)
def test_a_bad_option_of_a_group_is_refused_in_each_place_and_between_steps(options, text):
    weights = [torch.nn.Parameter(torch.ones(2, dtype=B16)) for _ in range(2)]
    with pytest.raises(ValueError, match=text):
        Tuned([{"params": weights[:1], **options}])
    optimizer = Tuned(weights[:1])
    with pytest.raises(ValueError, match=text):
        optimizer.add_param_group({"params": weights[1:], **options})
    assert len(optimizer.param_groups) == 1
    weights[0].grad = torch.ones_like(weights[0])
    optimizer.step()
    before = weights[0].detach().clone()
    optimizer.param_groups[0].update(options)
    with pytest.raises(ValueError, match=text):
        optimizer.step()
    assert torch.equal(weights[0], before)


OPTIONS = [
    {"master": master, "state_dtype": state_dtype}
    for master, state_dtype in (("split", torch.float32), ("fp32", torch.float32), ("fp32", B16), ("split", I8))
]


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
    assert ("scales" in keys) == (then["state_dtype"] == I8)
    assert ("master" in keys, "remainder" in keys) == (then["master"] == "fp32", then["master"] == "split")
    exact = all(it["state_dtype"] == torch.float32 for it in (first, then))
    bound = 0 if exact else 4e-2  # four steps of lr, each off by less than lr
    torch.testing.assert_close(*weights, rtol=0, atol=bound)


def test_the_optimizers_own_values_may_be_repeated_in_a_group():
    """ZeroRedundancyOptimizer repeats every option in a group."""
    repeated = {"max_norm": 1.0, "guard": True}
    optimizer = AdamW([{"params": [torch.ones(2, requires_grad=True)], **repeated}], **repeated)
    assert optimizer.param_groups[0]["max_norm"] == 1.0


def test_keys_that_users_add_to_a_group_are_kept():
    optimizer = AdamW([{"params": [torch.ones(2, requires_grad=True)], "name": "head", "initial_lr": 1.0, "scale": 2}])
    assert optimizer.param_groups[0]["scale"] == 2
