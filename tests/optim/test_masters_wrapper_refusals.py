"""What Masters refuses, and the grads that it takes."""

import pytest
import torch

from mpkernels.optim import AdamW, Masters
from mpkernels.optim.masters import true_weight
from tests.networks import B16, F16


class NeedsClosure(torch.optim.SGD):
    def step(self, closure):
        return super().step(closure)


PARAMS = [torch.nn.Parameter(torch.ones(3, dtype=B16))]


REFUSED = {
    "a class": (
        lambda: torch.optim.SGD,
        TypeError,
        "must be a torch.optim.Optimizer, got the class torch.optim.sgd.SGD",
    ),
    "no optimizer": (lambda: PARAMS, TypeError, "must be a torch.optim.Optimizer, got builtins.list"),
    "ours": (
        lambda: AdamW(PARAMS),
        ValueError,
        "must have no masters yet, got mpkernels.optim.adamw.AdamW, which keeps its own",
    ),
    "masters": (
        lambda: Masters(torch.optim.SGD(PARAMS)),
        ValueError,
        "must not hold another one, got mpkernels.optim.masters_wrapper.Masters",
    ),
    "LBFGS": (
        lambda: torch.optim.LBFGS(PARAMS),
        ValueError,
        "must step without a closure, got torch.optim.lbfgs.LBFGS",
    ),
    "closures": (lambda: NeedsClosure(PARAMS), ValueError, "must step without a closure"),
    "differentiable": (
        lambda: torch.optim.SGD([torch.ones(3, requires_grad=True)], differentiable=True),
        ValueError,
        "must have differentiable=False, got True",
    ),
}


@pytest.mark.parametrize(("make", "error", "text"), REFUSED.values(), ids=REFUSED)
def test_what_masters_cannot_wrap_is_refused(make, error, text):
    with pytest.raises(error, match=f"^Masters: optimizer {text}"):
        Masters(make())


def test_a_wrapper_of_another_optimizer_is_refused():
    outer = torch.optim.SGD(PARAMS)
    outer.inner = torch.optim.SGD(PARAMS)
    with pytest.raises(ValueError, match=r"^Masters: optimizer must not hold another one, got torch.optim.sgd.SGD"):
        Masters(outer)


def test_bad_options_are_refused_as_by_adamw():
    sgd = torch.optim.SGD(PARAMS)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'maxnorm'. Did you mean 'max_norm'"):
        Masters(sgd, maxnorm=1.0)
    for options in ({"max_norm": 0.0}, {"max_norm": 1.0, "guard": False}):
        with pytest.raises(ValueError, match="max_norm"):
            Masters(sgd, **options)


@pytest.mark.parametrize("options", [{"guard": False}, {}, {"max_norm": 1.0}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, B16, F16], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.SparseAdam])
def test_a_sparse_grad_reaches_an_optimizer_that_takes_one(kind, dtype, options):
    param, other = (torch.nn.Parameter(torch.ones(4, 3, dtype=it)) for it in (dtype, torch.float32))
    rows = torch.tensor([[1, 3, 1]])  # one of them twice
    values = torch.arange(1.0, 10.0).view(3, 3)
    param.grad, other.grad = (
        torch.sparse_coo_tensor(rows, values.to(it.dtype), (4, 3), check_invariants=True) for it in (param, other)
    )
    optimizer = Masters(kind([param], lr=0.1), **options)
    norm = other.grad.to_dense().norm()
    if "max_norm" in options:
        other.grad = other.grad * float(1.0 / (norm.double() + 1e-6))
    optimizer.step()
    kind([other], lr=0.1).step()
    torch.testing.assert_close(true_weight(param, optimizer.state[param]).float(), other.detach())
    if "max_norm" in options:
        torch.testing.assert_close(optimizer.grad_norm, norm)


def test_a_row_of_a_sparse_grad_may_add_up_beyond_fp16():
    param = torch.nn.Parameter(torch.ones(4, 3, dtype=F16))
    optimizer = Masters(torch.optim.SGD([param], lr=1e-6))
    rows, values = torch.tensor([[1, 1]]), torch.full((2, 3), 6e4, dtype=F16)
    param.grad = torch.sparse_coo_tensor(rows, values, (4, 3), check_invariants=True)
    optimizer.step()
    assert not optimizer.step_was_skipped
    torch.testing.assert_close(param[1].float(), torch.full((3,), 0.88), rtol=1e-3, atol=0)


def test_an_inf_in_a_sparse_grad_is_found():
    param = torch.nn.Parameter(torch.ones(4, 3, dtype=B16))
    optimizer = Masters(torch.optim.SGD([param], lr=0.1))
    rows, values = torch.tensor([[1]]), torch.full((1, 3), float("inf"), dtype=B16)
    param.grad = torch.sparse_coo_tensor(rows, values, (4, 3), check_invariants=True)
    optimizer.step()
    assert optimizer.step_was_skipped
    assert (param == 1).all()


def test_complex_parameters_are_clipped_and_stepped():
    param, other = (torch.nn.Parameter(torch.ones(3, dtype=torch.complex64)) for _ in range(2))
    param.grad = torch.full((3,), 3 + 4j, dtype=torch.complex64)
    optimizer = Masters(torch.optim.SGD([param], lr=0.1), max_norm=1.0)
    optimizer.step()
    other.grad = param.grad.clone()
    torch.nn.utils.clip_grad_norm_([other], 1.0)
    torch.optim.SGD([other], lr=0.1).step()
    torch.testing.assert_close(param, other)
    assert optimizer.grad_norm == pytest.approx(75**0.5)
