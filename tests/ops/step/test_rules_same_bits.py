"""Each rule: every kernel gives the reference's bits, and the reference steps as plain torch does in fp64."""

import contextlib
import itertools
import math

import pytest
import torch

import mpkernels
from tests.hard_grads import same_bits
from tests.ops.step.rules_table import B16, F16, F32, F64, I8, RULES, WEIGHTS, Rows, assert_same_steps, rows_on

each_rule = pytest.mark.parametrize("line", RULES.values(), ids=RULES)
without_the_reference = pytest.mark.kernels("native", "triton", "cuda")


@without_the_reference
@each_rule
def test_every_combination_of_dtypes_gives_the_references_bits(target, line):
    model = {"sizes": (37,) if target.is_interpreted else (37, 1000)}
    rows = assert_same_steps(target, line, steps=2 if target.is_interpreted else 4, model=model)
    assert {step.item() for step in rows.lists["steps"]} == {2.0 if target.is_interpreted else 4.0}
    assert_nothing_moves_on_overflow(rows)


@pytest.mark.kernels("reference")
@each_rule
def test_nothing_moves_on_overflow_in_the_reference(target, line):
    assert_nothing_moves_on_overflow(rows_on(target, line, sizes=(300,), states=(F32, I8)))


def assert_nothing_moves_on_overflow(rows):
    before = [it.clone() for tensors in rows.lists.values() for it in tensors]
    rows.step(rows.grads(9), found_inf=1.0)
    assert all(same_bits(a.cpu(), b.cpu()) for a, b in zip(before, itertools.chain(*rows.lists.values()), strict=True))


@without_the_reference
@each_rule
@pytest.mark.parametrize("state", [F32, B16, I8], ids=str)
@pytest.mark.parametrize("weight", WEIGHTS, ids=str)
def test_lists_of_one_kind_give_the_references_bits(target, line, weight, state):
    """A launch may run a kernel that is compiled for the one kind that all its parameters have."""
    model = {"sizes": (700, 3), "weights": [weight], "grads": [weight[0]], "states": [state]}
    assert_same_steps(target, line, model=model, steps=2)


@without_the_reference
@each_rule
@pytest.mark.parametrize("size", [1, 31, 32, 1023, 1024, 1025, 8193])
def test_every_size_gives_the_references_bits(target, line, size):
    model = {"sizes": (size,), "grads": (F32,), "states": (F32, I8), "weights": WEIGHTS[:2]}
    assert_same_steps(target, line, model=model, steps=2)


@without_the_reference
@each_rule
@pytest.mark.parametrize(
    "arguments",
    [{"grad_scale": 1024.0}, {"max_norm": 1.0}, {"grad_scale": 3.0, "max_norm": 0.5, "found_inf": 0.0}],
    ids=str,
)
def test_unscaling_and_clipping_give_the_references_bits(target, line, arguments):
    assert_same_steps(target, line, model={"sizes": (33,), "states": (F32,)}, **arguments)


@without_the_reference
@each_rule
def test_fp64_grads_are_multiplied_by_the_fp32_inverse_of_a_scale(target, line):
    """torch's scaler does the same. Grads of fewer bits wouldn't show whether the inverse was rounded."""
    model = {"sizes": (33,), "weights": [(F64, "none")], "grads": (F64,), "states": (F64,)}
    assert_same_steps(target, line, model=model, grad_scale=3.0)


@without_the_reference
@each_rule
def test_odd_numbers_give_the_references_bits(target, line):
    """The first states begin as -0.0. An infinite scale multiplies the grads of one group by 0, and those of the other
    group, which is maximized, by -0.0."""
    model = {"sizes": (300,), "weights": WEIGHTS[:1], "grads": (F32,), "states": (I8, F32)}
    ours, reference = rows_on(target, line, **model), Rows(line, in_pairs=target.is_interpreted, **model)
    odd = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 0.0, 1e-45, 3e38])
    for rows, backend in ((ours, contextlib.nullcontext()), (reference, mpkernels.backend("reference"))):
        for state in rows.lists[rows.rule.state_lists[0]]:
            state.neg_()
        with backend:
            for grad_scale in (None, math.inf):
                rows.step([odd.repeat(43)[:300].to(rows.device) for _ in rows.cases], grad_scale=grad_scale)
    assert ours.differences(reference) == []


@each_rule
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("which", [slice(None), slice(0, 1), slice(1, None)], ids=["all", "lr", "all but lr"])
def test_hyperparameters_may_be_tensors_on_the_device(target, line, which, dtype):
    model = {"sizes": (33,), "states": (F32,), "weights": WEIGHTS[:2]}
    by_value, on_device = rows_on(target, line, **model), rows_on(target, line, **model)
    may_be_tensors = list(line.hypers)[: line.ops.rule.may_be_tensors]
    names = may_be_tensors[which]
    rounded = {name: tuple(torch.tensor(line.hypers[name], dtype=dtype).double().tolist()) for name in names}
    hypers, nothing = line.hypers | rounded, torch.empty(0, device=target.device)
    tensors = [
        torch.full((), hypers[name][group], dtype=dtype, device=target.device) if name in names else nothing
        for group in (0, 1)
        for name in may_be_tensors
    ]
    for seed in range(2):
        by_value.step(by_value.grads(seed), hypers)
        on_device.step(on_device.grads(seed), hypers | dict.fromkeys(names, (0.5, 0.5)), on_device=tensors)
    assert on_device.differences(by_value) == []


@each_rule
@pytest.mark.parametrize("maximize", [False, True])
def test_steps_in_fp64_are_plain_torchs(target, line, maximize):
    rows = Rows(line, weights=[(F64, "none")], grads=(F64,) * 4, states=(F64,), device=target.device)
    params = [it.cpu().clone().requires_grad_() for it in rows.lists["params"]]
    twins = []
    for i, (param, (*_, has_optional)) in enumerate(zip(params, rows.cases, strict=True)):
        hypers = {name: x[rows.group_of(i)] for name, x in line.hypers.items()}
        twins.append(line.twin([param], **line.options(hypers, has_optional)))
    for seed in range(5):
        grads = rows.grads(seed)
        for param, grad, twin in zip(params, grads, twins, strict=True):
            param.grad = -grad.cpu() if maximize else grad.cpu()
            twin.step()
        rows.step(grads, maximize=(maximize, maximize))
    for param, ours in zip(params, rows.lists["params"], strict=True):
        torch.testing.assert_close(ours.cpu(), param.detach(), rtol=1e-14, atol=1e-15)


@each_rule
@pytest.mark.parametrize("kind", ["split", "fp32"])
def test_a_master_is_what_an_fp32_weight_would_be(target, line, kind):
    model = {"sizes": (500,), "grads": (B16,), "states": (F32,)}
    ours = rows_on(target, line, weights=[(B16, kind)], **model)
    plain = rows_on(target, line, weights=[(F32, "none")], **model)
    for i, param in enumerate(plain.lists["params"]):
        param.copy_(ours.weight(i))
    for seed in range(4):
        ours.step(ours.grads(seed))
        plain.step(plain.grads(seed))
    for i, param in enumerate(plain.lists["params"]):
        assert same_bits(ours.weight(i).cpu(), param.cpu())
        assert same_bits(ours.lists["params"][i].cpu(), param.cpu().to(B16))


LAYOUTS = {
    "plain": lambda value: value.contiguous(),
    "last": lambda value: value.contiguous(memory_format=torch.channels_last),
    "sliced": lambda value: torch.stack([value, value], -1)[..., 0],
}
# Each case gives the layouts of the params, the masters, the grads and the states, in this order.
KINDS = [("last", "plain", "plain", "last"), ("plain", "last", "sliced", "plain"), ("sliced", "plain", "last", "last")]


@without_the_reference
@pytest.mark.each_value_once
@each_rule
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
@pytest.mark.parametrize("state", [F32, I8], ids=str)
@pytest.mark.parametrize("weight", WEIGHTS[1:4:2], ids=str)
def test_lists_in_different_layouts_give_the_references_bits(target, line, weight, state, kinds):
    """8-bit states share their scales in the order in which they lie in memory."""
    model = {"sizes": (360,), "weights": [weight], "grads": (F32,), "states": (state,)}
    ours, reference = rows_on(target, line, **model), Rows(line, in_pairs=target.is_interpreted, **model)
    for rows, backend in ((ours, contextlib.nullcontext()), (reference, mpkernels.backend("reference"))):
        names = {"params": kinds[0], "masters": kinds[1]} | dict.fromkeys(rows.rule.state_lists, kinds[3])
        for name, kind in names.items():
            laid_out = [LAYOUTS[kind](it.view(4, 6, 5, 3)) if it.numel() else it for it in rows.lists[name]]
            rows.lists[name] = laid_out
        with backend:
            for _ in range(2):
                rows.step([LAYOUTS[kinds[2]](grad.view(4, 6, 5, 3)) for grad in rows.grads(0)])
    assert ours.differences(reference) == []


@each_rule
def test_bad_arguments_are_named(line):
    rows = Rows(line, sizes=(5, 6), weights=WEIGHTS[:1], grads=(F32,), states=(F32,))
    first = rows.rule.state_lists[0]
    whole = rows.lists[first]
    rows.lists[first] = whole[:-1] if len(whole) > 1 else [whole[0], whole[0]]
    with pytest.raises(ValueError, match=f"{rows.rule.op}: {first} must be as long as params, {len(whole)}"):
        rows.step(rows.grads(0))
    rows.lists[first] = [it.to(F16) for it in whole]
    with pytest.raises(TypeError, match=rf"{rows.rule.op}: {first}\[\d\] must be fp32, bf16 or int8"):
        rows.step(rows.grads(0))
    rows.lists[first] = whole
    rows.lists["scales"] = [torch.ones(1) for _ in whole]
    with pytest.raises(TypeError, match=rf"{rows.rule.op}: scales\[0\] must be there for int8 states, and only there"):
        rows.step(rows.grads(0))
    rows.lists["scales"] = []
    with pytest.raises(ValueError, match=f"{rows.rule.op}: lr must hold one for each of 2 groups, got 3"):
        rows.step(rows.grads(0), rows.line.hypers | {"lr": (0.1, 0.1, 0.1)})
