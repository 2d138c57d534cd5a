"""The cache casts each parameter once in an autocast block, and never returns a stale cast."""

import threading

import pytest
import torch

import mpkernels
from mpkernels import functional, nn, optim
from mpkernels.linear import cast_cache
from tests.cast_counts import B16, Casts, ThroughData, autocast, by_torch, forward


@pytest.fixture
def layer():
    torch.manual_seed(0)
    yield nn.LinearAct(7, 5)
    cast_cache.clear()


def casts_of(layer, **keywords):
    with Casts(*(it.shape for it in layer.parameters())) as casts:
        forward(layer, **keywords)
    return casts.count


OPTIMIZERS = {
    "ours": optim.AdamW,
    "torch": torch.optim.AdamW,
    "fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "through data": ThroughData,
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_forward_after_a_step_uses_the_new_weights(layer, make):
    optimizer = make(layer.parameters())
    for _ in range(3):
        before = forward(layer)
        optimizer.step()
        optimizer.zero_grad()
        after = forward(layer)
        assert not torch.equal(after, before)
        torch.testing.assert_close(after, by_torch(layer), rtol=0.02, atol=0.02)


def test_a_parameter_is_cast_once_in_a_block(layer):
    for _ in range(2):
        with autocast():
            assert [casts_of(layer) for _ in range(3)] == [2, 0, 0]


@pytest.mark.parametrize("backward", [True, False])
def test_a_write_through_data_between_two_blocks_counts(layer, backward):
    before = forward(layer, backward)
    layer.weight.data.mul_(2)
    assert not torch.equal(forward(layer, backward), before)


def test_the_node_that_keeps_casts_shows_in_no_hook(layer):
    saved = []
    with autocast():
        with torch.autograd.graph.saved_tensors_hooks(lambda it: saved.append(it) or it, lambda it: it):
            cast_cache.cast(layer.weight, B16)
        assert not saved
        torch.clear_autocast_cache()
        assert cast_cache._block() is None
        with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
            assert cast_cache.cast(layer.weight, B16) is cast_cache.cast(layer.weight, B16)


CHANGES = {
    "in place": lambda weight: weight.mul_(2),
    "a part": lambda weight: weight[0].zero_(),
    "copied": lambda weight: weight.copy_(weight * 2),
    "data replaced": lambda weight: setattr(weight, "data", weight.data * 2),
    "through a view": lambda weight: weight.view(-1)[3:5].add_(1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=[*CHANGES])
def test_a_change_within_a_block_counts(layer, change):
    with autocast():
        before = forward(layer)
        with torch.no_grad():
            change(layer.weight)
        after = forward(layer)
        assert not torch.equal(after, before)
        cast_cache.clear()
        assert torch.equal(after, forward(layer))


def test_the_cast_has_torchs_bits(layer):
    for dtype in (B16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            kept = cast_cache.cast(layer.weight, dtype)
            assert kept is cast_cache.cast(layer.weight, dtype)
        assert kept.dtype == dtype
        assert not kept.requires_grad
        assert torch.equal(kept, layer.weight.detach().to(dtype))


def test_no_cast_is_kept_if_autocasts_cache_is_off(layer):
    with autocast(cache_enabled=False):
        assert [casts_of(layer, cache_enabled=False) for _ in range(2)] == [2, 2]


def test_only_parameters_that_are_trained_are_kept(layer):
    """torch's cache does the same. Tensors that each forward computes would never be found again."""
    computed = layer.weight * 2
    layer.bias.requires_grad_(False)
    with autocast():
        for tensor, is_kept in ((layer.weight, True), (layer.bias, False), (computed, False)):
            assert (cast_cache.cast(tensor, B16) is cast_cache.cast(tensor, B16)) == is_kept


TRANSPOSES = {"t": lambda it: it.t(), "mT": lambda it: it.mT, "permute": lambda it: it.permute(1, 0)}


@pytest.mark.parametrize("transpose", TRANSPOSES.values(), ids=TRANSPOSES)
def test_a_parameter_and_its_transpose_share_one_cast(transpose):
    """One cast serves the parameter and its view. The view's cast has the view's strides, so that torch chooses the
    same product. A write to either makes a new cast."""
    weight = torch.nn.Parameter(torch.randn(5, 7))
    with autocast():
        with Casts((5, 7), (7, 5)) as casts:
            for _ in range(3):
                kept = cast_cache.cast(transpose(weight), B16)
            weights_cast = cast_cache.cast(weight, B16)
        assert casts.count == 1
        assert (kept.data_ptr(), kept.stride(), kept.requires_grad) == (weights_cast.data_ptr(), (1, 7), False)
        for written_to in (weight, transpose(weight)):
            with torch.no_grad():
                written_to.mul_(2)
            assert torch.equal(cast_cache.cast(transpose(weight), B16), weight.detach().t().to(B16))
    assert cast_cache._block() is None


def test_no_other_view_of_a_parameter_is_taken_for_its_transpose():
    weight, wide = torch.nn.Parameter(torch.randn(4, 4)), torch.nn.Parameter(torch.randn(4, 8))
    views = weight[:2].t(), weight[1:].t(), weight[:, 1:].t(), weight.view(16)[:8].view(4, 2).t(), weight.flip(0).t()
    with autocast():
        for view in (*views, torch._neg_view(weight).t(), weight.detach().t(), wide.view(8, 4).t(), (2 * weight).t()):
            for _ in range(2):
                assert torch.equal(cast_cache.cast(view, B16), view.detach().to(B16))
        assert not cast_cache._block()


def test_a_backward_in_another_thread_keeps_the_casts(target):
    """For each GPU, autograd has a thread of its own."""
    weight = torch.nn.Parameter(torch.randn(7, 5, device=target.device))
    with torch.autocast(target.device.type, dtype=B16), Casts(weight.shape, weight.t().shape) as casts:
        for _ in range(3):
            loss = functional.linear_act(torch.ones(3, 7, device=target.device), weight.t(), None, "silu").sum()
            thread = threading.Thread(target=backward_in, args=(target, loss))
            thread.start()
            thread.join()
    assert casts.count == 1
    assert weight.grad is not None


def backward_in(target, loss):
    torch.set_autocast_enabled(target.device.type, True)  # in this thread
    with target.active():
        loss.backward()


def test_parameters_can_be_swapped(layer, monkeypatch):
    """torch.utils.swap_tensors refuses tensors with weak references."""
    forward(layer)
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    assert layer.half().weight.dtype == torch.float16


def test_threads_may_end_each_others_blocks(layer):
    want, got = forward(layer, backward=False), []
    threads = [threading.Thread(target=lambda: got.append(forward(layer, backward=False))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 8
    assert all(torch.equal(it, want) for it in got)


def test_no_cast_is_kept_while_torch_traces(layer):
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as fake:
        forward(layer, backward=False)
        assert cast_cache._block() is None
        assert fake is not None
    with torch.autocast("cpu", dtype=B16):
        with mpkernels.backend("native"):
            torch.func.grad(lambda x: layer(x).float().sum())(torch.ones(3, 7))
        parameters = {name: it.detach() for name, it in layer.named_parameters()}
        torch.func.grad(lambda it: torch.func.functional_call(layer, it, torch.ones(3, 7)).float().sum())(parameters)
    torch.compile(forward, fullgraph=True, backend="aot_eager")(layer, backward=False)
    torch.compiler.reset()
    assert cast_cache._block() is None


def test_no_cast_is_kept_in_a_step_if_autocasts_cache_is_off(layer):
    with cast_cache.one_step(), torch.autocast("cpu", dtype=B16, cache_enabled=False):
        assert cast_cache.cast(layer.weight, B16) is not cast_cache.cast(layer.weight, B16)


def test_a_block_without_a_cache_inside_one_with_it_casts_anew(layer):
    with torch.autocast("cpu", dtype=B16):
        kept = cast_cache.cast(layer.weight, B16)
        with torch.autocast("cpu", dtype=B16, cache_enabled=False):
            assert cast_cache.cast(layer.weight, B16) is not kept
        assert cast_cache.cast(layer.weight, B16) is kept
