"""Blocks whose weights all train: which autograd Function computes them, and what it keeps and frees."""

from weakref import ref

import pytest
import torch

from benchmarks.counting import peak_beside
from mpkernels import selector
from mpkernels.functional import linear_act, mlp
from mpkernels.linear import cast_cache
from tests.block_cases import BLOCKS
from tests.linear.choosing import empty_selector

B16, F32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def _(monkeypatch):
    empty_selector(monkeypatch)
    selector.pin("native")


def tensors(block, rows=(5, 8), hidden=6, outputs=4, dtype=F32):
    torch.manual_seed(0)
    shapes = rows, *BLOCKS[block].shapes(rows[-1], hidden, outputs)
    return [torch.randn(shape).div(shape[-1] ** 0.5).to(dtype).requires_grad_() for shape in shapes]


def test_a_parameter_on_another_device_is_refused_after_a_call_that_worked():
    """torch's F.linear takes a weight on the meta device beside an x on a CPU, and returns garbage."""
    x, weight, bias = (it.detach() for it in tensors("linear_act"))
    for kernel in (None, "torch", "native"):
        selector.pin(kernel)
        for activation in ("silu", "gelu"):
            linear_act(x, weight, bias, activation)
            with pytest.raises((TypeError, ValueError, RuntimeError), match="meta"):
                linear_act(x, weight.to("meta"), bias.to("meta"), activation)


def function_of(y):
    return type(y.grad_fn).__name__.removesuffix("Backward")


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("rows", [(5, 8), (2, 3, 8)])
def test_a_block_that_trains_as_a_whole_goes_by_the_small_function(block, rows):
    given = tensors(block, rows)
    ours = BLOCKS[block].ours
    for _ in range(2):  # the first call, too: a checkpoint may recompute it by a later one
        y = ours("silu", *given)
        assert function_of(y) == "_TrainedBlock"
        assert y.shape[:-1] == rows[:-1]
    assert function_of(ours("silu", given[0], given[1].detach(), *given[2:])) == "_Block"
    if len(rows) > 2:
        turned = given[0].detach().transpose(0, 1).requires_grad_()
        assert function_of(ours("silu", turned, *given[1:])) != "_TrainedBlock"


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("mixed", [False, True])
def test_a_retained_graph_gives_the_same_gradients_again_and_another_one_none(block, mixed):
    given = tensors(block)
    with torch.autocast("cpu", B16, enabled=mixed):
        y = BLOCKS[block].ours("gelu", *given)
    first, second = (torch.autograd.grad(y.sum(), given, retain_graph=retain) for retain in (True, False))
    assert all(map(torch.equal, first, second))
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


@pytest.mark.parametrize("mixed", [False, True])
def test_a_second_backward_refuses_a_weight_that_was_changed(mixed):
    x, weight, bias = tensors("linear_act")
    with torch.autocast("cpu", B16, enabled=mixed):
        y = linear_act(x, weight, bias)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_a_second_backward_takes_what_torchs_takes():
    """torch needs no bias for it, and no weight where x wants no gradient."""
    x, weight, bias = tensors("linear_act")
    for given, changed in ((x, bias), (x.detach(), weight)):
        calls = linear_act, lambda *it: torch.nn.functional.gelu(torch.nn.functional.linear(*it))
        ys = [call(given, weight, bias) for call in calls]
        with torch.no_grad():
            changed.mul_(2)
        ours, torchs = (torch.autograd.grad(y.sum(), bias, create_graph=True)[0] for y in ys)
        torch.testing.assert_close(ours, torchs)


def test_a_weight_that_is_computed_is_freed_by_the_backward():
    x, weight, bias = tensors("linear_act")
    made = weight * 2
    freed = ref(made)
    y = linear_act(x, made, bias)
    del made
    y.sum().backward()
    assert freed() is None
    assert y.grad_fn is not None


def test_casts_are_freed_by_the_backward(monkeypatch):
    kept, make = [], cast_cache.cast
    monkeypatch.setattr(cast_cache, "cast", lambda *given: kept.append(ref(cast := make(*given))) or cast)
    x, w1, b1, w2, b2 = tensors("mlp")
    with torch.autocast("cpu", B16):
        y = mlp(x, w1, b1, w2, b2)
    assert sum(it() is not None for it in kept) >= 2
    y.sum().backward()
    assert [it() for it in kept] == [None] * 4


# What torch keeps through the backward of a relu is as small as what a gated block keeps, and ours holds dy longer.
LIMITS = {("gated", "relu"): 1.03, ("gated mlp", "relu"): 1.03}


@pytest.mark.parametrize("block", ["linear_act", "gated", "mlp", "gated mlp", "gated mlp stacked"])
@pytest.mark.parametrize("activation", ["silu", "relu"])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "autocast"])
def test_a_backward_needs_no_more_memory_than_torchs(block, activation, kind):
    given = tensors(block, (2048, 256), 896, 256, B16 if kind == "bf16" else F32)

    def run(call):
        with torch.autocast("cpu", B16, enabled=kind == "autocast"):
            y = call(activation, *given)
        y.backward(torch.ones_like(y))
        for it in given:
            it.grad = None

    peaks = []
    for call in (BLOCKS[block].ours, BLOCKS[block].torchs):
        run(call)
        peaks.append(peak_beside(lambda call=call: run(call)))
    limit = 1.03 if kind == "autocast" else LIMITS.get((block, activation), 1)
    assert peaks[0] <= peaks[1] * limit + 4096


@pytest.mark.parametrize("block", ["mlp", "gated mlp"])
def test_a_recomputing_backward_needs_no_more_memory_than_torchs_checkpoint(block):
    given = tensors(block, (2048, 256), 896, 256)
    call = BLOCKS[block].torchs

    def run(compute):
        y = compute()
        y.backward(torch.ones_like(y))
        for it in given:
            it.grad = None

    def checkpointed():
        return torch.utils.checkpoint.checkpoint(lambda x: call("silu", x, *given[1:]), given[0], use_reentrant=False)

    runs = (lambda: BLOCKS[block].ours("silu", *given, recompute=True)), checkpointed
    for compute in runs:
        run(compute)
    ours, torchs = (peak_beside(lambda compute=compute: run(compute)) for compute in runs)
    assert ours <= torchs
