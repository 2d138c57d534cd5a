"""find_nonfinite names the first module whose output holds an inf or NaN."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mpkernels.amp import find_nonfinite
from tests.amp.test_amp_steps import Watch

INF, NAN = float("inf"), float("nan")


class Root(torch.nn.Module):
    """A module that gives NaN for negative inputs."""

    def forward(self, x):
        return x.sqrt()


def network(*modules):
    torch.manual_seed(0)
    first = torch.nn.Linear(3, 3)
    torch.nn.init.eye_(first.weight)
    return torch.nn.Sequential(first, torch.nn.Sequential(torch.nn.Tanh(), *modules), torch.nn.ReLU())


def first_of(model, *inputs):
    with find_nonfinite(model) as found:
        model(*inputs)
    return found.first


def test_the_first_module_that_gives_nan_is_named():
    first = first_of(network(Root(), torch.nn.Tanh()), torch.ones(2, 3) * torch.tensor([[1.0], [-1.0]]))
    assert (first.module, first.kind) == ("1.1", "Root")
    assert first.had_finite_inputs
    assert first.has_finite_weights


def test_finite_outputs_name_no_module():
    model = nn.Sequential(nn.Linear(2, 2))
    with find_nonfinite(model) as found:
        assert found.first is None
        assert str(found) == "No module of the model was called inside this context."
        model(torch.ones(1, 2))
    assert str(found) == "All outputs of 2 calls of modules were finite."


def test_it_starts_anew_when_it_is_entered_again():
    model = network()
    found = find_nonfinite(model)
    for value, is_found in ((INF, True), (1.0, False)):
        with found:
            model(torch.full((2, 3), value))
        assert (found.first is not None) == is_found


def test_an_inf_in_the_input_is_noted():
    first = first_of(network(), torch.tensor([[1.0, INF, 1.0]]))
    assert (first.module, first.had_finite_inputs, first.has_finite_weights) == ("0", False, True)


def test_a_nan_in_the_weights_is_noted():
    model = network()
    model[0].bias.data[1] = NAN
    first = first_of(model, torch.ones(3))
    assert (first.module, first.had_finite_inputs, first.has_finite_weights) == ("0", True, False)


class InPlace(torch.nn.Module):
    def forward(self, x):
        return x.div_(0)


def test_an_input_counts_as_it_was_before_the_module_overwrote_it():
    assert first_of(torch.nn.Sequential(InPlace()), torch.ones(2)).had_finite_inputs


def test_the_model_itself_may_be_the_first():
    first = first_of(Root(), -torch.ones(2))
    assert first.module == ""
    assert str(first) == "the model itself (Root)"


@dataclass
class Output:
    logits: torch.Tensor
    rest: tuple[int, None] = (1, None)


OUTPUTS = {
    "tuple": lambda x: (torch.ones(2), x),
    "dict of lists": lambda x: {"a": [torch.zeros(2, dtype=torch.int64), (x,)]},
    "dataclass": Output,
    "complex": lambda x: x.to(torch.complex64),
    "sparse": lambda x: x.to_sparse(),
    "fp64": lambda x: x.new_ones(2, 3, dtype=torch.float64) * x,
    # torch lacks isfinite for these.
    "nested": lambda x: torch.nested.nested_tensor([x, x[:1]]),
    "csr": lambda x: x.to_sparse_csr(),
    "float8": lambda x: x.to(torch.float8_e5m2),
}


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype", "ignore:Sparse CSR")
@pytest.mark.parametrize("wrap", OUTPUTS.values(), ids=OUTPUTS)
@pytest.mark.parametrize("bad", [INF, NAN])
def test_outputs_of_any_structure_are_looked_at(wrap, bad):
    class Wrapping(torch.nn.Module):
        def forward(self, x):
            return wrap(x)

    x = torch.ones(2, 3)
    assert first_of(Wrapping(), x) is None
    x[0, 1] = bad
    assert first_of(Wrapping(), x).module == ""


def test_keyword_inputs_are_looked_at():
    class Pair(torch.nn.Module):
        def forward(self, *, a, b):
            return a + b

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.pair = Pair()

        def forward(self, x):
            return self.pair(a=x, b=x / 0)

    assert not first_of(Model(), torch.ones(2)).had_finite_inputs


def test_of_a_module_used_twice_the_call_that_made_the_nan_counts():
    root, shift = Root(), torch.nn.Linear(1, 1, bias=False)
    shift.weight.data.fill_(-1.0)
    assert first_of(torch.nn.Sequential(root, shift, root), torch.ones(1, 1)).module == "0"
    assert first_of(torch.nn.Sequential(shift, root), -torch.ones(1, 1)) is None


def test_of_a_module_that_calls_itself_the_inner_call_counts():
    """The inner call ends first, so its inputs are reported."""

    class Inside(torch.nn.Module):
        def forward(self, x, depth):
            return self(x / 0, depth - 1) if depth else x + 1

    first = first_of(Inside(), torch.ones(2), 1)
    assert (first.module, first.had_finite_inputs) == ("", False)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_module_in_a_checkpoint_is_named(use_reentrant):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.block = network(Root())

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=use_reentrant).sum()

    model, x = Model(), torch.ones(2, 3, requires_grad=True)
    model.block[0].bias.data.fill_(-10.0)
    with find_nonfinite(model) as found:
        model(x).backward()
    assert found.first.module == "block.1.1"
    assert x.grad is not None


def test_hooks_are_gone_afterwards():
    model = network()
    with pytest.raises(RuntimeError), find_nonfinite(model):
        model(torch.ones(2, 7))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_call_that_failed_is_not_counted():
    model = network(Root())
    with find_nonfinite(model) as found:
        with pytest.raises(RuntimeError):
            model(torch.ones(2, 7))
        assert found.first is None
        model(torch.full((3,), NAN))
    assert found.first.module == "0"


def test_the_host_does_not_wait_in_the_context():
    model = network(Root())
    with find_nonfinite(model) as found, Watch():
        model(-torch.ones(2, 3))
    assert found.first is not None


def test_scripted_modules_and_calls_in_transforms_are_not_looked_at():
    model = torch.nn.Sequential(torch.jit.script(torch.nn.Linear(3, 3)), torch.nn.ReLU())
    with find_nonfinite(model) as found:
        torch.vmap(model)(torch.ones(2, 3))
        model(torch.full((2, 3), torch.inf))
    assert found.first.kind == "ReLU"
