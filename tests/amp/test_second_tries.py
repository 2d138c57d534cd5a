"""If a method of GradScaler's fails at any place, before or after an op has run, it can be called again, with the same
result as if it hadn't failed."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mpkernels.amp import GradScaler
from mpkernels.optim import AdamW, Masters
from tests.amp.test_grad_scaler import OPTIMIZERS, SCALINGS
from tests.hard_grads import same_bits
from tests.networks import B16, F16


class Failing(TorchDispatchMode):
    """Ends its block with an error at the op of this number; with ``is_late`` after the op has run."""

    def __init__(self, number, is_late, error):
        super().__init__()
        self.number, self.is_late, self.error, self.has_failed = number, is_late, error, False

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.number -= 1
        if self.number == -1 and not self.is_late:
            raise self.error
        result = op(*args, **(kwargs or {}))
        if self.number == -1:
            raise self.error
        return result

    def __exit__(self, kind, *rest):
        super().__exit__(kind, *rest)
        self.has_failed = kind is self.error
        return self.has_failed


def failing_at_each_op(is_late, error=KeyboardInterrupt, at_least=3):
    """Yield a block after the other that fails at the next op, until one doesn't fail."""
    for number in range(1000):
        failing = Failing(number, is_late, error)
        yield failing
        if not failing.has_failed:
            assert number >= at_least
            return
    raise AssertionError("there is no end")


class Run:
    """A parameter of each dtype, whose unscaled grads are 1, and one without elements."""

    def __init__(self, make, bad=None, **options):
        self.params = [nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (torch.float32, B16, F16, torch.float64)]
        self.params += [nn.Parameter(torch.ones(2, 3).t()), nn.Parameter(torch.ones(0))]
        self.optimizer, self.scaler = make(self.params), GradScaler("cpu", init_scale=1024.0, **options)
        self.prepare(bad)

    def prepare(self, bad=None):
        scale = self.scaler.scale(torch.ones(())).item()
        for param in self.params:
            param.grad = torch.full_like(param, scale)
        if bad is not None:
            self.params[0].grad[1] = bad

    def call(self, method):
        getattr(self.scaler, method)(*() if method == "update" else (self.optimizer,))

    def state(self):
        """Return all state that a user sees."""
        scaler, optimizer = self.scaler, self.optimizer
        numbers = [scaler.get_scale(), scaler._get_growth_tracker(), scaler.skipped_steps.item(), scaler._updates]
        numbers += [None if (it := scaler.step_was_skipped) is None else it.item(), scaler.overflow_report().as_dict()]
        tensors = [*self.params, *(it.grad for it in self.params)]
        return numbers, [*tensors, *(it for state in optimizer.state.values() for it in state.values())]


before_or_after = pytest.mark.parametrize("is_late", [False, True], ids=["before the op", "after the op"])
# By method: the calls that come before it, and after it.
BEFORE = {"unscale_": [], "step": [], "update": ["step"]}
AFTER = {"unscale_": ["step", "update"], "step": ["update"], "update": []}


def assert_second_tries(method, make, is_late, error=KeyboardInterrupt, has_begun=lambda run: False, **options):
    """Assert that a second try gives the same, with an error at each op in turn, until ``has_begun``."""
    for failing in failing_at_each_op(is_late, error, at_least=1 if method == "update" else 3):
        run, undisturbed = Run(make, **options), Run(make, **options)
        for before in BEFORE[method]:
            run.call(before)
        with failing:
            run.call(method)
        if failing.has_failed:
            if has_begun(run):
                return
            run.call(method)
        for it in AFTER[method]:
            run.call(it)
        for it in (*BEFORE[method], method, *AFTER[method]):
            undisturbed.call(it)
        (numbers, tensors), (wanted_numbers, wanted_tensors) = run.state(), undisturbed.state()
        assert numbers == wanted_numbers
        assert all(map(same_bits, tensors, wanted_tensors))


@pytest.mark.parametrize("bad", [None, float("inf")])
@before_or_after
@pytest.mark.parametrize("name", ["SGD", "torch's AdamW", "our AdamW"])
def test_unscale_can_be_called_again_after_an_error(name, is_late, bad):
    assert_second_tries("unscale_", OPTIMIZERS[name], is_late, bad=bad)


@pytest.mark.parametrize("options", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize("bad", [None, float("inf")])
@before_or_after
def test_update_can_be_called_again_after_an_error(is_late, bad, options):
    options = {key: it for key, it in options.items() if key != "scaling" or it == "static"} | {"bad": bad}
    assert_second_tries("update", OPTIMIZERS["our AdamW"], is_late, torch.OutOfMemoryError, **options)


@pytest.mark.parametrize("options", [{}, {"max_norm": 1.0}, {"guard": False}, {"state_dtype": torch.int8}], ids=str)
@pytest.mark.parametrize("bad", [None, float("inf")])
@before_or_after
def test_step_can_be_called_again_after_an_error(is_late, bad, options):
    assert_second_tries("step", lambda params: AdamW(params, lr=0.1, **options), is_late, bad=bad)


class Begins(torch.optim.SGD):
    has_begun = False

    def step(self, closure=None):
        self.has_begun = True
        return super().step(closure)


@pytest.mark.parametrize("bad", [None, float("inf")])
@before_or_after
def test_step_of_masters_can_be_called_again_until_the_wrapped_optimizer_steps(is_late, bad):
    """What the wrapped optimizer has done before it raises is kept, as without Masters."""

    def make(params):
        return Masters(Begins(params, lr=0.1), max_norm=1.0)

    assert_second_tries("step", make, is_late, bad=bad, has_begun=lambda run: run.optimizer.wrapped.has_begun)


@before_or_after
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("method", ["unscale_", "step"])
def test_grads_of_the_next_iteration_are_unscaled_and_stepped(method, in_place, is_late):
    """After an error, a loop may give the iteration up and go on with other grads, which belong to no second try."""
    for failing in failing_at_each_op(is_late, torch.OutOfMemoryError):
        run = Run(OPTIMIZERS["our AdamW"])
        with failing:
            run.call(method)
        if not failing.has_failed:
            continue
        before = [(param.detach().clone(), steps_of(run, param)) for param in run.params]
        old = [param.grad for param in run.params]  # somebody may hold on to the old grads
        run.optimizer.zero_grad(set_to_none=not in_place)
        for param in run.params:
            grad = torch.full_like(param, run.scaler.get_scale())
            param.grad = grad if param.grad is None else param.grad.add_(grad)
        run.call("unscale_")
        assert all((param.grad == 1).all() for param in run.params)
        run.call("step")
        for param, (weight, steps) in zip(run.params, before, strict=True):
            assert (param < weight).all()
            assert steps_of(run, param) == steps + 1
        assert all(grad is param.grad for grad, param in zip(old, run.params, strict=True)) == in_place


def steps_of(run, param):
    return run.optimizer.state[param].get("step", torch.zeros(())).item()


@before_or_after
def test_a_scale_that_could_not_be_made_is_made_later(is_late):
    for failing in failing_at_each_op(is_late, torch.OutOfMemoryError):
        param = nn.Parameter(torch.ones(3))
        optimizer, scaler = AdamW([param]), GradScaler("cpu", init_scale=8.0)
        with failing:
            scaler.scale(torch.ones(()))
        scaler.scale(param.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert (scaler.get_scale(), scaler.skipped_steps.item()) == (8.0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, F16], ids=str)
@pytest.mark.parametrize("coalesced", [True, False])
@before_or_after
def test_unscale_of_sparse_grads_can_be_called_again_after_an_error(is_late, coalesced, dtype):
    for failing in failing_at_each_op(is_late):
        embedding, scaler = nn.Embedding(10, 3, sparse=True).to(dtype), GradScaler("cpu", init_scale=1024.0)
        optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
        scaler.scale(embedding(torch.tensor([1, 1, 2])).float().sum()).backward()
        grad = embedding.weight.grad
        embedding.weight.grad = grad.coalesce() if coalesced else grad
        with failing:
            scaler.unscale_(optimizer)
        if failing.has_failed:
            scaler.unscale_(optimizer)
        assert embedding.weight.grad.to_dense().sum(1).tolist() == [0, 6, 3, *[0] * 7]


def test_a_third_call_raises_what_torch_raises_for_a_second():
    run = Run(OPTIMIZERS["our AdamW"])
    with Failing(4, True, KeyboardInterrupt) as failing:
        run.call("unscale_")
    assert failing.has_failed
    run.call("unscale_")
    with pytest.raises(RuntimeError, match=r"unscale_.. has already been called on this optimizer since"):
        run.call("unscale_")
    run.call("step")
    with pytest.raises(RuntimeError, match=r"step.. has already been called since the last"):
        run.call("step")
