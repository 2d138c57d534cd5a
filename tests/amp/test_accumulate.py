"""accumulate takes the steps that one batch as large as a group would take."""

from contextlib import contextmanager

import pytest
import torch
from torch.testing import assert_close

from mpkernels.amp import GradScaler, accumulate
from mpkernels.optim import AdamW
from tests.amp.test_grad_scaler import INIT
from tests.networks import B16, batch, network

MAX_NORM = 0.1


def loss_of(model, batch):
    inputs, targets = batch
    return (model(inputs) - targets).square().mean()


def by_hand(every, batches, kind, max_norm=MAX_NORM):
    """Train by hand: one backward for the concatenation of each group."""
    model = network()
    optimizer = kind(model.parameters(), lr=1e-2)
    for first in range(0, len(batches), every):
        optimizer.zero_grad()
        loss_of(model, [torch.cat(it) for it in zip(*batches[first : first + every], strict=True)]).backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return model


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, AdamW])
@pytest.mark.parametrize("scaled", [True, False])
def test_a_group_steps_as_one_batch(kind, scaled):
    """Of seven batches in groups of three the last is a group by itself, and takes a whole step."""
    batches = [batch(seed) for seed in range(7)]
    model, scaler = network(), GradScaler("cpu", enabled=scaled, **INIT)
    optimizer = kind(model.parameters(), lr=1e-2)
    steps = 0
    optimizer.register_step_post_hook(lambda *_: seen.append([p.grad.norm() for p in model.parameters()]))
    seen = []
    for micro in accumulate(iter(batches), 3, optimizer, scaler=scaler, max_norm=MAX_NORM):
        micro.backward(loss_of(model, micro.batch))
        steps += micro.is_last
        assert all((param.grad is None) == micro.is_last for param in model.parameters())
    assert steps == len(seen) == 3
    assert all(torch.stack(norms).norm() <= MAX_NORM * 1.001 for norms in seen)
    assert_close(model.state_dict(), by_hand(3, batches, kind).state_dict(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [(64, 8, 1, 30), (64, 64, 64)])
def test_batches_that_differ_are_weighed(rows):
    """A batch is weighed by its rows, because the mean of all rows isn't the mean of the batches' means. Nothing is
    clipped here: clipping would hide a wrong size."""
    batches = [[it[:count] for it in batch(seed)] for seed, count in enumerate(rows)]
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    weigh = None if len(set(rows)) == 1 else lambda batch: len(batch[0])
    for micro in accumulate(batches, 2, optimizer, weigh=weigh):
        micro.backward(loss_of(model, micro.batch))
    assert_close(model.state_dict(), by_hand(2, batches, torch.optim.SGD, None).state_dict(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("max_norm", [MAX_NORM, None])
@pytest.mark.parametrize(
    "kind",
    [torch.optim.SGD, AdamW, lambda params, lr: AdamW(params, lr, max_norm=MAX_NORM)],
    ids=["sgd", "ours", "clips"],
)
def test_the_last_batch_of_a_group_has_the_norm(kind, max_norm, scaled):
    """It is the norm of the unscaled grads before clipping."""
    model, twin, scaler = network(), network(), GradScaler("cpu", enabled=scaled, **INIT)
    optimizer = kind(model.parameters(), lr=1e-2)
    for micro in accumulate([batch(seed) for seed in range(3)], 2, optimizer, scaler=scaler, max_norm=max_norm):
        twin.load_state_dict(model.state_dict())
        (loss_of(twin, micro.batch) * micro._share).backward()
        micro.backward(loss_of(model, micro.batch))
        computes_a_norm = isinstance(optimizer, AdamW) and (scaled or optimizer.max_norm is not None)
        if micro.is_last and (max_norm is not None or computes_a_norm):
            expected = torch.nn.utils.get_total_norm([it.grad for it in twin.parameters()])
            assert_close(micro.grad_norm, expected, rtol=1e-4, atol=0)
        else:
            assert micro.grad_norm is None
        if micro.is_last:
            twin.zero_grad()


@pytest.mark.parametrize("width", [None, torch.float32], ids=str)
def test_an_overflow_skips_the_step_of_its_group(width):
    model, scaler = network(torch.float32 if width is None else B16), GradScaler("cpu", **INIT)
    optimizer, weights, grad_norms = AdamW(model.parameters()), [], []
    inputs, targets = (it.to(model[0].weight.dtype) for it in batch(0))
    options = {"scaler": scaler, "max_norm": MAX_NORM, "grad_dtype": width}
    for micro in accumulate([1.0, float("inf"), 1.0, 1.0], 2, optimizer, **options):
        micro.backward(loss_of(model, (inputs, targets)) * micro.batch)
        weights.append(model[0].weight.detach().clone())
        grad_norms.append(micro.grad_norm)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[2], weights[3])
    assert scaler.get_scale() == INIT["init_scale"] / 2
    assert scaler.skipped_steps == 1
    assert grad_norms[::2] == [None, None]
    assert [it.isfinite() for it in grad_norms[1::2]] == [False, True]


def test_released_grads_add_up():
    results = []
    for releases in (True, False):
        model = network(B16)
        optimizer = AdamW(model.parameters(), guard=False)
        if releases:
            optimizer.release_grads()
        for micro in accumulate([batch(seed) for seed in range(5)], 2, optimizer):
            micro.backward((model(micro.batch[0].to(B16)).float() - micro.batch[1]).square().mean())
        results.append(model.state_dict())
    assert_close(*results, rtol=0, atol=0)


def test_it_draws_no_more_than_a_group_ahead():
    drawn = []

    def stream():
        for i in range(100):
            drawn.append(i)
            yield i

    weight = torch.ones((), requires_grad=True)
    for micro in accumulate(stream(), 4, torch.optim.SGD([weight])):
        micro.backward(weight * micro.batch)
        if micro.batch == 5:
            break
    assert len(drawn) == 8
    assert weight.grad is not None  # the grad of the group that the loop left


def test_no_sync_covers_all_but_the_last_batch_and_ends_on_an_error():
    class Model(torch.nn.Linear):
        exchanges = True

        @contextmanager
        def no_sync(self):
            self.exchanges = False
            try:
                yield
            finally:
                self.exchanges = True

    model, seen = Model(1, 1), []
    optimizer = torch.optim.SGD(model.parameters())
    for micro in accumulate(range(5), 3, optimizer, model=model):
        seen.append(model.exchanges)
        micro.backward(model(torch.ones(1, 1)).sum())
    assert seen == [False, False, True, False, True]

    def fail():
        for _ in accumulate(range(5), 3, optimizer, model=model):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert model.exchanges


def test_misuse_is_refused():
    weight = torch.ones((), requires_grad=True)
    optimizer = torch.optim.SGD([weight])
    with pytest.raises(ValueError, match="every, the number of batches in a group, must be an int above 0, got 0"):
        accumulate([], 0, optimizer)
    with pytest.raises(ValueError, match="must be an int above 0, got SGD"):
        accumulate([], optimizer, 4)
    with pytest.raises(ValueError, match="max_norm must be above 0, got 0"):
        accumulate([], 1, optimizer, max_norm=0.0)
    with pytest.raises(TypeError, match="accumulate: max_norm must be a number above 0 or None, got '1'"):
        accumulate([], 1, optimizer, max_norm="1")
    with pytest.raises(TypeError, match="accumulate: weigh must be a function of a batch, got 2"):
        accumulate([], 1, optimizer, weigh=2)
    with pytest.raises(TypeError, match=r"optimizer must be a torch.optim.Optimizer, got Linear"):
        accumulate([], 1, torch.nn.Linear(1, 1))
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got SGD"):
        accumulate([], 1, optimizer, model=optimizer)
    with pytest.raises(TypeError, match=r"scaler must be a torch.amp.GradScaler or None, got bool"):
        accumulate([], 1, optimizer, scaler=True)
    with pytest.raises(ValueError, match=r"weigh must give a group more than 0 in all, got \[0.0, 0.0\]"):
        next(accumulate([1, 1], 2, optimizer, weigh=lambda _: 0))
    for weights in ([-1.0, 3.0], [float("inf"), 1.0]):
        with pytest.raises(ValueError, match="weigh must give each batch a finite weight of 0 or more, got "):
            next(accumulate(weights, 2, optimizer, weigh=lambda batch: batch))
    with pytest.raises(RuntimeError, match="must call backward"):
        list(accumulate([1], 1, optimizer))
    micro = next(accumulate([1, 1], 2, optimizer))
    micro.backward(weight * 1)
    with pytest.raises(RuntimeError, match="called for this batch already"):
        micro.backward(weight * 1)
    assert list(accumulate([], 1, optimizer)) == []


def test_a_batch_of_weight_0_adds_no_grad():
    """The mean of no tokens is NaN, and so is 0 times its gradient."""
    groups = [
        [[1.0, 1.0], [1.0, 0.0]],
        [[0.0, 0.0], [1.0, 1.0], [0.0, 1.0]],
        [[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]],
    ]
    weights = []
    for group in groups:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for micro in accumulate(map(torch.tensor, group), 3, optimizer, weigh=lambda counts: counts.sum().item()):
            losses = model(torch.ones(2, 3)).square().squeeze(-1)
            micro.backward((losses * micro.batch).sum() / micro.batch.sum())
        weights.append(model.weight)
    assert weights[0].isfinite().all()
    assert_close(weights[1:], weights[:1] * 2)


def test_max_norm_is_refused_where_grads_are_released_at_once():
    model = network()
    optimizer = AdamW(model.parameters())
    release = optimizer.release_grads()
    with pytest.raises(ValueError, match="accumulate: max_norm must be given to AdamW, before release_grads"):
        accumulate([], 2, optimizer, max_norm=1.0)
    release.remove()
    accumulate([], 2, optimizer, max_norm=1.0)
    optimizer = AdamW(model.parameters(), guard=True)
    optimizer.release_grads()
    accumulate([], 2, optimizer, max_norm=1.0)


def test_the_last_batch_of_a_group_has_a_weight():
    """Batches of weight 0 come before it, because DDP exchanges all grads of the group in the last batch's backward."""
    order = []
    optimizer = torch.optim.SGD([weight := torch.nn.Parameter(torch.ones(1))], lr=0.1)
    for micro in accumulate([3, 0, 2, 0, 0, 1], 3, optimizer, weigh=float):
        order.append(micro.batch)
        micro.backward(weight.sum())
    assert order == [0, 3, 2, 0, 0, 1]
